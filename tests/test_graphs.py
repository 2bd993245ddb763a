"""Graphs that are right for every number of nodes, and what mixing over them does to sums and means."""

from __future__ import annotations

from itertools import pairwise
from math import log2

import pytest
import torch
from torch import Tensor

from hpcsgd.errors import UserError
from hpcsgd.graphs import (
    BipartiteExponential,
    Complete,
    Exponential,
    Graph,
    Ring,
    UndirectedExponential,
    push_matrix,
    senders,
    symmetric_matrix,
)

GRAPHS = [
    Exponential(1),
    Exponential(2),
    Exponential(3),
    Exponential(99),
    UndirectedExponential(),
    Ring(),
    Complete(),
    BipartiteExponential(),
]
SYMMETRIC = [graph for graph in GRAPHS if graph.symmetric]
SIZES = range(2, 65)


def product(matrices: list[Tensor]) -> Tensor:
    """Of the steps in the order in which they happen."""
    result = torch.eye(len(matrices[0]), dtype=torch.float64)
    for matrix in matrices:
        result = matrix @ result
    return result


@pytest.mark.parametrize("graph", GRAPHS, ids=repr)
def test_nobody_talks_to_itself_or_twice(graph: Graph) -> None:
    for n in range(1, 65):
        for t in range(2 * graph.period(n)):
            for i in range(n):
                peers = graph.peers(i, t, n)
                assert i not in peers
                assert len(set(peers)) == len(peers)
                assert all(0 <= j < n for j in peers)
                assert peers or n == 1


@pytest.mark.parametrize("graph", GRAPHS, ids=repr)
def test_a_period_later_it_is_the_same_graph(graph: Graph) -> None:
    for n in SIZES:
        T = graph.period(n)
        for t in range(T):
            assert graph.peers(n // 2, t, n) == graph.peers(n // 2, t + T, n)


@pytest.mark.parametrize("graph", GRAPHS, ids=repr)
def test_within_a_period_everybody_reaches_everybody(graph: Graph) -> None:
    """B-connectivity: the union of the graphs of a period is strongly connected (assumption of theorem 1)."""
    for n in SIZES:
        union = torch.stack([push_matrix(graph, t, n) for t in range(graph.period(n))]).sum(0)
        reach = torch.matrix_power((union > 0).double(), n)
        assert (reach > 0).all(), n


@pytest.mark.parametrize("graph", SYMMETRIC, ids=repr)
def test_edges_go_both_ways(graph: Graph) -> None:
    for n in SIZES:
        for t in range(graph.period(n)):
            for i in range(n):
                assert sorted(graph.peers(i, t, n)) == sorted(senders(graph, i, t, n))


@pytest.mark.parametrize("graph", GRAPHS, ids=repr)
def test_pushing_preserves_the_sum(graph: Graph) -> None:
    for n in SIZES:
        for t in range(graph.period(n)):
            columns = push_matrix(graph, t, n).sum(0)
            torch.testing.assert_close(columns, torch.ones_like(columns), rtol=0, atol=1e-12)


@pytest.mark.parametrize("graph", SYMMETRIC, ids=repr)
def test_symmetric_mixing_is_doubly_stochastic(graph: Graph) -> None:
    for n in SIZES:
        for t in range(graph.period(n)):
            W = symmetric_matrix(graph, t, n)
            ones = torch.ones(n, dtype=torch.float64)
            assert torch.equal(W, W.T)
            assert (W >= 0).all()
            torch.testing.assert_close(W.sum(1), ones, rtol=0, atol=1e-12)


def test_the_exponential_graph_is_regular() -> None:
    """As many in as out, so that push-sum weights stay 1."""
    for peers in (1, 2, 3):
        for n in SIZES:
            for t in range(Exponential(peers).period(n)):
                rows = push_matrix(Exponential(peers), t, n).sum(1)
                torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_one_peer_is_exact_after_log2_n_steps(n: int) -> None:
    mixed = product([push_matrix(Exponential(1), t, n) for t in range(int(log2(n)))])
    torch.testing.assert_close(mixed, torch.full_like(mixed, 1 / n), rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [n for n in range(5, 34) if n & (n - 1)])  # 3 nodes with 2 peers are complete
@pytest.mark.parametrize("peers", [1, 2])
def test_other_sizes_converge_geometrically(n: int, peers: int) -> None:
    graph = Exponential(peers)
    period = product([push_matrix(graph, t, n) for t in range(graph.period(n))])
    mean = torch.full_like(period, 1 / n)
    distances = [torch.linalg.matrix_norm(torch.matrix_power(period, c) - mean, 2) for c in range(1, 6)]
    assert distances[0] > 1e-3  # not exact
    assert all(after < 0.8 * before for before, after in pairwise(distances))


def test_distances_of_the_paper() -> None:
    """Appendix A.2: with 8 nodes the hops are 1, 2, 4, one at a time or two at a time."""
    assert [Exponential(1).peers(5, t, 8) for t in range(4)] == [[6], [7], [1], [6]]
    assert [Exponential(2).peers(0, t, 8) for t in range(3)] == [[1, 2], [4, 1], [2, 4]]


def test_opposite_nodes_at_powers_of_two_are_one_neighbour() -> None:
    assert UndirectedExponential().peers(0, 1, 4) == [2]
    assert Ring().peers(0, 0, 2) == [1]


def test_no_peers_at_all() -> None:
    with pytest.raises(UserError, match="peers = 0: a group sends to at least 1 other"):
        Exponential(0)
