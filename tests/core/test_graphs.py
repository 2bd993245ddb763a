"""Tests of graphs for every number of nodes, and of what mixing does to sums and means."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcsgd.core.graphs import (
    BipartiteExponential,
    Complete,
    Exponential,
    Graph,
    PowersOfTwo,
    Ring,
    UndirectedExponential,
    senders,
)
from hpcsgd.core.mixing import push_matrix, symmetric_matrix
from hpcsgd.errors import UserError

GRAPHS = [
    Exponential(1),
    Exponential(2),
    Exponential(3),
    Exponential(4),
    Exponential(99),
    PowersOfTwo(1),
    PowersOfTwo(2),
    PowersOfTwo(3),
    PowersOfTwo(99),
    UndirectedExponential(),
    Ring(),
    Complete(),
    BipartiteExponential(),
]
SYMMETRIC = [graph for graph in GRAPHS if graph.symmetric]
SIZES = range(2, 65)


@pytest.mark.parametrize("graph", GRAPHS, ids=repr)
def test_a_graph_is_symmetric_if_it_says_so(graph: Graph) -> None:
    """d_psgd relies on this attribute, and nothing else checks the edges."""
    steps = [(t, n) for n in (3, 7, 201) for t in range(graph.period(n))]
    there = {(t, n, i, j) for t, n in steps for i in range(n) for j in graph.peers(i, t, n)}
    assert graph.symmetric == all((t, n, j, i) in there for t, n, i, j in there)


def product(matrices: list[Tensor]) -> Tensor:
    """Return the product of the matrices of several steps, given in the order of the steps."""
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
    """The union of the graphs of a period is strongly connected: B-connectivity, assumed by theorem 1."""
    for n in SIZES:
        union = torch.stack([push_matrix(graph, t, n) for t in range(graph.period(n))]).sum(0)
        reach = torch.matrix_power((union > 0).double(), n)
        assert (reach > 0).all(), n


@pytest.mark.slow
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


@pytest.mark.parametrize("make", [Exponential, PowersOfTwo])
@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_exponential_graphs_are_regular(make: Callable[[int], Graph], peers: int) -> None:
    """Each node sends to as many as it receives from, so that push-sum weights stay 1."""
    graph = make(peers)
    for n in SIZES:
        for t in range(graph.period(n)):
            rows = push_matrix(graph, t, n).sum(1)
            torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-12)


Distances = Callable[[int, int], list[int]]
"""Returns the distances of the nodes to which each of n nodes sends in step t."""


def multiples(p: int) -> Distances:
    """Return the distances j·(p+1)^k for j = 1 … p of `Exponential(p)`, implemented independently."""

    def distances(t: int, n: int) -> list[int]:
        powers = [(p + 1) ** k for k in range(n) if (p + 1) ** k < n] or [0]
        return [j * powers[t % len(powers)] for j in range(1, p + 1)]

    return distances


def consecutive(p: int) -> Distances:
    """Return p powers of two, the distances of `PowersOfTwo(p)`."""

    def distances(t: int, n: int) -> list[int]:
        powers = [2**k for k in range(n) if 2**k < n]
        return [powers[(p * t + k) % len(powers)] for k in range(min(p, len(powers)))]

    return distances


def circulant(distances: Distances, t: int, n: int) -> np.ndarray:
    """Return the column-stochastic mixing matrix: every node keeps one share and sends the others away."""
    column = np.zeros(n)
    column[[0, *(distance % n for distance in distances(t, n))]] = 1
    return np.stack([np.roll(column, i) for i in range(n)], axis=1) / column.sum()


@pytest.mark.parametrize(
    ("graph", "distances"),
    [(Exponential(p), multiples(p)) for p in range(1, 6)]
    + [(PowersOfTwo(p), consecutive(p)) for p in range(1, 4)],
    ids=lambda value: repr(value) if isinstance(value, Exponential | PowersOfTwo) else "distances",
)
def test_shares_are_those_of_the_definition(graph: Graph, distances: Distances) -> None:
    """This also holds where distances coincide or lead back to the node, such as 6 among 6 nodes."""
    for n in range(1, 34):
        for t in range(2 * graph.period(n) + 1):
            np.testing.assert_array_equal(push_matrix(graph, t, n).numpy(), circulant(distances, t, n))


def pushed(graph: Graph, t: int, n: int) -> np.ndarray:
    """Return the mixing matrix, computed only from the peers."""
    P = np.eye(n)
    for i in range(n):
        P[graph.peers(i, t, n), i] = 1
    return P / P.sum(0)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_mean_is_exact_at_multiples_of_powers(p: int) -> None:
    """n = m·(p+1)^k nodes with m ≤ p + 1 need exactly k + 1 steps.

    With two peers, 6 and 9 nodes need 2 steps, and 27 nodes need 3.
    """
    exact = {m * (p + 1) ** k: k + 1 for k in range(4) for m in range(2, p + 2)}
    for n, steps in exact.items():
        mixed = np.eye(n)
        for t in range(steps):
            assert np.abs(mixed - 1 / n).max() > 1e-3
            mixed = pushed(Exponential(p), t, n) @ mixed
        np.testing.assert_allclose(mixed, 1 / n, rtol=0, atol=1e-15)


def test_nine_nodes_have_the_mean_after_two_steps() -> None:
    """The distances are those of the authors' code with two peers: 1 and 2, then 3 and 6."""
    x = np.random.default_rng(0).normal(size=(9, 4))
    mixed = pushed(Exponential(2), 1, 9) @ pushed(Exponential(2), 0, 9) @ x
    np.testing.assert_allclose(mixed, np.broadcast_to(x.mean(0), (9, 4)), rtol=0, atol=1e-15)


def steps_to_the_mean(distances: Distances, n: int) -> int:
    """Return the number of steps after which each node's share of each value is 1/n to within 1e-12."""
    mixed, t = np.eye(n), 0
    while np.abs(mixed - 1 / n).max() >= 1e-12:
        mixed, t = circulant(distances, t, n) @ mixed, t + 1
    return t


def test_base_three_is_the_better_default_for_two_peers() -> None:
    """docs/gossip.md says so: base three needs fewer steps for most numbers of nodes, but not for all."""
    ours = {n: steps_to_the_mean(multiples(2), n) for n in range(2, 33)}
    powers_of_two = {n: steps_to_the_mean(consecutive(2), n) for n in range(2, 33)}
    assert {n: (ours[n], powers_of_two[n]) for n in (4, 6, 8, 9, 12, 16, 18, 24, 27, 32)} == {
        4: (25, 25), 6: (2, 35), 8: (25, 35), 9: (2, 54), 12: (35, 47), 16: (42, 48), 18: (3, 57),
        24: (36, 56), 27: (3, 48), 32: (48, 56),
    }  # fmt: skip
    assert sum(ours[n] < powers_of_two[n] for n in ours) == 25
    assert [n for n in ours if ours[n] == powers_of_two[n]] == [2, 3, 4]
    assert {n: (ours[n], powers_of_two[n]) for n in ours if ours[n] > powers_of_two[n]} == {
        7: (34, 25), 11: (38, 33), 21: (48, 45),
    }  # fmt: skip


@pytest.mark.parametrize("p", [3, 4])
def test_with_more_peers_it_is_nowhere_worse(p: int) -> None:
    for n in range(2, 33):
        assert steps_to_the_mean(multiples(p), n) <= steps_to_the_mean(consecutive(p), n)


# Left out: 3 nodes with 2 peers, which are a complete graph, and multiples of powers of 3, which are exact.
@pytest.mark.parametrize(
    ("graph", "n"),
    [(PowersOfTwo(p), n) for p in (1, 2) for n in range(5, 34) if n & (n - 1)]
    + [(Exponential(2), n) for n in range(4, 34) if n not in (6, 9, 18, 27)],
    ids=repr,
)
def test_other_sizes_converge_geometrically(graph: Graph, n: int) -> None:
    period = product([push_matrix(graph, t, n) for t in range(graph.period(n))])
    mean = torch.full_like(period, 1 / n)
    distances = [torch.linalg.matrix_norm(torch.matrix_power(period, c) - mean, 2) for c in range(1, 6)]
    assert distances[0] > 1e-3  # not exact
    assert all(after < 0.8 * before for before, after in pairwise(distances))


def test_distances_of_the_paper() -> None:
    """Appendix A.2: with 8 nodes the hops are 1, 2, 4, one at a time or two at a time."""
    assert [Exponential(1).peers(5, t, 8) for t in range(4)] == [[6], [7], [1], [6]]
    assert [PowersOfTwo(2).peers(0, t, 8) for t in range(3)] == [[1, 2], [4, 1], [2, 4]]


def test_distances_of_the_authors_code() -> None:
    """With two peers they are 1 and 2, 3 and 6, 9 and 18 in turn.

    A distance that leads to the same node again, or back to the sender, is left out.
    """
    assert [Exponential(2).peers(1, t, 9) for t in range(3)] == [[2, 3], [4, 7], [2, 3]]
    assert [Exponential(2).peers(0, t, 12) for t in range(3)] == [[1, 2], [3, 6], [9, 6]]
    assert [Exponential(2).peers(0, t, 6) for t in range(2)] == [[1, 2], [3]]
    assert [Exponential(3).peers(0, t, 8) for t in range(2)] == [[1, 2, 3], [4]]
    assert Exponential(10**12).peers(1, 0, 3) == [2, 0]


def test_opposite_nodes_at_powers_of_two_are_one_neighbour() -> None:
    assert UndirectedExponential().peers(0, 1, 4) == [2]
    assert Ring().peers(0, 0, 2) == [1]


@pytest.mark.parametrize("make", [Exponential, PowersOfTwo])
def test_no_peers_at_all(make: Callable[[int], Graph]) -> None:
    with pytest.raises(UserError, match="peers = 0: a group sends to at least 1 other"):
        make(0)
