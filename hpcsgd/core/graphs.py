"""Who talks to whom when groups gossip, and the mixing matrices that follow.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019
("the SGP paper" elsewhere), section 2 and appendix A. A graph of n nodes may change from step to step; every
one here is right for every n, not only for powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcsgd.errors import UserError


@runtime_checkable
class Graph(Protocol):
    """Nodes 0 … n−1 and whom each of them talks to in step t = 0, 1, …"""

    @property
    def symmetric(self) -> bool:
        """Whether all edges go both ways."""
        ...

    def period(self, n: int) -> int:
        """After so many steps it begins again."""
        ...

    def peers(self, i: int, t: int, n: int) -> list[int]:
        """Whom node i sends to in step t: never itself, nobody twice."""
        ...


@dataclass(frozen=True)
class Exponential:
    """Directed: with p peers (`per_step`) node i sends to i + j·(p+1)^k (mod n), j = 1 … p, one k a step, in
    turn.

    With one peer these are the paper's distances 1, 2, 4, …, with more those of its authors' code. The mean
    is exact after k + 1 steps where n = m·(p+1)^k with m ≤ p + 1. A node that two distances lead to counts
    once, and none leads home: for some n the last k has fewer than p peers.
    """

    per_step: int = 1
    symmetric = False

    def __post_init__(self) -> None:
        _require_peers(self.per_step)

    def period(self, n: int) -> int:
        return max(len(_powers(self.per_step + 1, n)), 1)

    def peers(self, i: int, t: int, n: int) -> list[int]:
        multiples = range(1, min(self.per_step, n - 1) + 1)  # from n on they come again
        hops = _in_turn(_powers(self.per_step + 1, n), t, 1)
        return _others(i, [i + j * hop for hop in hops for j in multiples], n)


@dataclass(frozen=True)
class PowersOfTwo:
    """Directed: node i sends to i + 2^k (mod n), `per_step` of the distances 2^0 … 2^⌊log2(n−1)⌋ in each
    step, in turn. With one it is `Exponential`; with two it needs more steps to the mean for most n."""

    per_step: int = 1
    symmetric = False

    def __post_init__(self) -> None:
        _require_peers(self.per_step)

    def period(self, n: int) -> int:
        hops = len(_powers(2, n))
        return hops // gcd(hops, self.per_step) if hops else 1

    def peers(self, i: int, t: int, n: int) -> list[int]:
        return [(i + hop) % n for hop in _in_turn(_powers(2, n), t, self.per_step)]


@dataclass(frozen=True)
class UndirectedExponential:
    """Node i talks to i ± 2^k (mod n), one distance a step, in turn."""

    symmetric = True

    def period(self, n: int) -> int:
        return max(len(_powers(2, n)), 1)

    def peers(self, i: int, t: int, n: int) -> list[int]:
        hops = _in_turn(_powers(2, n), t, 1)
        return _others(i, [i + sign * hop for hop in hops for sign in (1, -1)], n)


@dataclass(frozen=True)
class Ring:
    """Node i talks to i ± 1 (mod n)."""

    symmetric = True

    def period(self, n: int) -> int:
        return 1

    def peers(self, i: int, t: int, n: int) -> list[int]:
        return _others(i, [i + 1, i - 1], n)


@dataclass(frozen=True)
class Complete:
    """Everybody talks to everybody."""

    symmetric = True

    def period(self, n: int) -> int:
        return 1

    def peers(self, i: int, t: int, n: int) -> list[int]:
        return _others(i, [i + hop for hop in range(1, n)], n)


@dataclass(frozen=True)
class BipartiteExponential:
    """Even nodes talk to odd ones only: the a-th even one to the odd ones number a + 2^k − 1, in turn.

    Where n is odd, two even nodes share an odd one in every step.
    """

    symmetric = True

    def period(self, n: int) -> int:
        return max(len(_bipartite_hops(n)), 1)

    def peers(self, i: int, t: int, n: int) -> list[int]:
        odd = n // 2
        if odd == 0:
            return []
        (hop,) = _in_turn(_bipartite_hops(n), t, 1)
        if i % 2 == 0:
            return [2 * ((i // 2 + hop) % odd) + 1]
        return [even for even in range(0, n, 2) if (even // 2 + hop) % odd == i // 2]


GRAPHS: Mapping[str, Callable[..., Graph]] = {
    "bipartite_exponential": BipartiteExponential,
    "complete": Complete,
    "exponential": Exponential,
    "powers_of_two": PowersOfTwo,
    "ring": Ring,
    "undirected_exponential": UndirectedExponential,
}
"""As job files call them."""


def senders(graph: Graph, i: int, t: int, n: int) -> list[int]:
    """From whom node i receives in step t."""
    return [j for j in range(n) if i in graph.peers(j, t, n)]


def push_matrix(graph: Graph, t: int, n: int) -> Tensor:
    """P of step t, float64 [n, n]: column i says how node i splits itself, evenly over itself and its peers.

    Column-stochastic, so that Σ_i x_i stays as it is (the SGP paper, section 2).
    """
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        peers = graph.peers(i, t, n)
        matrix[[i, *peers], i] = 1 / (len(peers) + 1)
    return matrix


def symmetric_matrix(graph: Graph, t: int, n: int) -> Tensor:
    """W of step t, float64 [n, n], by Metropolis' rule: w_ij = 1 / (1 + the larger of both degrees).

    Symmetric and doubly stochastic, whether or not all nodes have as many neighbours.
    """
    neighbours = [graph.peers(i, t, n) for i in range(n)]
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for i, mine in enumerate(neighbours):
        for j in mine:
            matrix[i, j] = 1 / (1 + max(len(mine), len(neighbours[j])))
        matrix[i, i] = 1 - matrix[i].sum()
    return matrix


def _require_peers(per_step: int) -> None:
    if per_step < 1:
        raise UserError(f"peers = {per_step}: a group sends to at least 1 other in every step")


def _powers(base: int, n: int) -> list[int]:
    """base^0, base^1, … up to the largest that is at most n − 1."""
    powers, power = [], 1
    while power < n:
        powers.append(power)
        power *= base
    return powers


def _bipartite_hops(n: int) -> list[int]:
    """2^k − 1, as far as they lead to different odd nodes."""
    return [hop - 1 for hop in [1 << k for k in range(n.bit_length())] if hop <= n // 2]


def _in_turn(hops: list[int], t: int, count: int) -> list[int]:
    count = min(count, len(hops))
    return [hops[(t * count + k) % len(hops)] for k in range(count)]


def _others(i: int, nodes: list[int], n: int) -> list[int]:
    return [j for j in dict.fromkeys(node % n for node in nodes) if j != i]
