"""The mixing matrices of a graph: the share of each node's model in each node's next model."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.core.graphs import Graph


def push_matrix(graph: Graph, t: int, n: int) -> Tensor:
    """Return the matrix P of step t, float64 [n, n], by which n nodes send parts of their models.

    In column i, node i keeps one part of its model and sends equal parts to its peers. Columns add up to 1,
    so the sum Σ_i x_i of the nodes' models does not change (the SGP paper, section 2).
    """
    matrix = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    for i in range(n):
        peers = graph.peers(i, t, n)
        matrix[[i, *peers], i] = 1 / (len(peers) + 1)
    return matrix


def symmetric_matrix(graph: Graph, t: int, n: int) -> Tensor:
    """Return the symmetric mixing matrix W of step t, float64 [n, n], by Metropolis' rule.

    For neighbors i and j, w_ij = 1 / (1 + the larger of their degrees). W is symmetric and doubly stochastic,
    even if nodes have different numbers of neighbors.
    """
    neighbours = [graph.peers(i, t, n) for i in range(n)]
    matrix = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    for i, mine in enumerate(neighbours):
        for j in mine:
            matrix[i, j] = 1 / (1 + max(len(mine), len(neighbours[j])))
        matrix[i, i] = 1 - matrix[i].sum()
    return matrix


def mean_leaving(graph: Graph, n: int, per_host: int) -> float:
    """Return the share of the messages of one period of `graph` that go to another host.

    `per_host`: number of nodes on each host. Node i is on host ⌊i / `per_host`⌋.
    """
    if n <= per_host:
        return 0.0
    nodes = range(n if n <= 64 else per_host)
    sent = [(i, j) for i in nodes for t in range(graph.period(n)) for j in graph.peers(i, t, n)]
    return sum(i // per_host != j // per_host for i, j in sent) / len(sent)


def mean_peers(graph: Graph, n: int) -> float:
    """Return the mean number of nodes to which a node sends per step, over all nodes and one period."""
    if n == 1:
        return 0.0
    period = graph.period(n)
    nodes = range(n if n <= 64 else 1)  # large graphs look alike from every node
    counts = [len(graph.peers(i, t, n)) for i in nodes for t in range(period)]
    return sum(counts) / len(counts)
