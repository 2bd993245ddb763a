"""The mixing matrices of a graph: the share of each node's model in each node's next model."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.core.graphs import Graph


def push_matrix(graph: Graph, t: int, n: int) -> Tensor:
    """Return P of step t, float64 [n, n]: node i splits itself evenly over itself and its peers in column i.

    Column-stochastic, so that Σ_i x_i stays as it is (the SGP paper, section 2).
    """
    matrix = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    for i in range(n):
        peers = graph.peers(i, t, n)
        matrix[[i, *peers], i] = 1 / (len(peers) + 1)
    return matrix


def symmetric_matrix(graph: Graph, t: int, n: int) -> Tensor:
    """Return W of step t, float64 [n, n], by Metropolis' rule: w_ij = 1 / (1 + the larger of both degrees).

    Symmetric and doubly stochastic, even if nodes have different numbers of neighbors.
    """
    neighbours = [graph.peers(i, t, n) for i in range(n)]
    matrix = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    for i, mine in enumerate(neighbours):
        for j in mine:
            matrix[i, j] = 1 / (1 + max(len(mine), len(neighbours[j])))
        matrix[i, i] = 1 - matrix[i].sum()
    return matrix


def mean_leaving(graph: Graph, n: int, per_host: int) -> float:
    """Return the share of a period's messages that goes to another host, with `per_host` nodes on each."""
    if n <= per_host:
        return 0.0
    nodes = range(n if n <= 64 else per_host)
    sent = [(i, j) for i in nodes for t in range(graph.period(n)) for j in graph.peers(i, t, n)]
    return sum(i // per_host != j // per_host for i, j in sent) / len(sent)


def mean_peers(graph: Graph, n: int) -> float:
    """Return how many nodes a node sends to per step: the mean over all nodes and a period of the graph."""
    if n == 1:
        return 0.0
    period = graph.period(n)
    nodes = range(n if n <= 64 else 1)  # large graphs look alike from every node
    counts = [len(graph.peers(i, t, n)) for i in nodes for t in range(period)]
    return sum(counts) / len(counts)
