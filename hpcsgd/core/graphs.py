"""Graphs that say which groups exchange models in gossip methods; `mixing` has their matrices.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019
("the SGP paper" elsewhere), section 2 and appendix A. A graph of n nodes may change from step to step. Every
graph here works for every n, not only for powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Protocol, runtime_checkable

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError


@runtime_checkable
class Graph(Protocol):
    """The nodes that each of n nodes, 0 … n−1, sends to in step t = 0, 1, …; a node is a group.

    `sgp` and `d_psgd` take such a graph. Any class with these three members is a graph.

    Example:
        >>> class Partners:
        ...     symmetric = True
        ...     def period(self, n):
        ...         return 1
        ...     def peers(self, i, t, n):
        ...         return [i ^ 1] if i ^ 1 < n else []
        >>> hpcsgd.graphs.senders(Partners(), 2, t=0, n=4)
        [3]
        >>> method = hpcsgd.d_psgd(graph=Partners())
    """

    @property
    def symmetric(self) -> bool:
        """True if all edges go both ways."""
        ...

    def period(self, n: int) -> int:
        """Return the number of steps after which the graph of `n` nodes repeats."""
        ...

    def peers(self, i: int, t: int, n: int) -> list[int]:
        """Return the nodes that node `i` of `n` sends to in step `t`: distinct, and never `i` itself."""
        ...


@checked
@dataclass(frozen=True)
class Exponential:
    """A directed graph: node i sends to i + j·(p+1)^k (mod n), j = 1 … p, with the next k in each step.

    For p = 1 the distances are the paper's 1, 2, 4, …; for larger p they are those of its authors' code.
    The mean is exact after k + 1 steps if n = m·(p+1)^k with m ≤ p + 1. Two distances that lead to the same
    node count once, and none leads to i itself. So for some n the last k has fewer than p peers.

    Args:
        per_step: Peers per step (p), at least 1. Default 1, which sends least.

    Raises:
        UserError: If `per_step` is below 1.

    Example:
        >>> [hpcsgd.graphs.Exponential(2).peers(0, t, n=9) for t in (0, 1)]
        [[1, 2], [3, 6]]

    References:
        M. Assran et al., ICML 2019, appendix A, and their code.

    See Also:
        `PowersOfTwo`: the same for one peer.
        `UndirectedExponential`: with edges that go both ways.
    """

    per_step: int = 1
    symmetric = False

    def __post_init__(self) -> None:
        _require_peers(self.per_step)

    def period(self, n: int) -> int:
        return max(len(_powers(self.per_step + 1, n)), 1)

    def peers(self, i: int, t: int, n: int) -> list[int]:
        multiples = range(1, min(self.per_step, n - 1) + 1)  # multiples ≥ n lead to the same nodes again
        hops = _in_turn(_powers(self.per_step + 1, n), t, 1)
        return _others(i, [i + j * hop for hop in hops for j in multiples], n)


@checked
@dataclass(frozen=True)
class PowersOfTwo:
    """A directed graph: node i sends to i + 2^k (mod n), for the next `per_step` k in each step.

    The distances are 2^0 … 2^⌊log2(n−1)⌋. With one peer it equals `Exponential`. With two it needs more steps
    to reach the mean for most n than `Exponential(per_step=2)`, whose distances are 3^k and 2·3^k.

    Args:
        per_step: Peers per step, at least 1. Default 1.

    Raises:
        UserError: If `per_step` is below 1.

    Example:
        >>> [hpcsgd.graphs.PowersOfTwo(2).peers(0, t, n=9) for t in (0, 1)]
        [[1, 2], [4, 8]]

    References:
        M. Assran et al., ICML 2019, appendix A.
    """

    per_step: int = 1
    symmetric = False

    def __post_init__(self) -> None:
        _require_peers(self.per_step)

    def period(self, n: int) -> int:
        hops = len(_powers(2, n))
        return hops // gcd(hops, self.per_step) if hops else 1

    def peers(self, i: int, t: int, n: int) -> list[int]:
        return [(i + hop) % n for hop in _in_turn(_powers(2, n), t, self.per_step)]


@checked
@dataclass(frozen=True)
class UndirectedExponential:
    """An undirected graph: node i exchanges with i ± 2^k (mod n), with the next k in each step.

    Example:
        >>> [hpcsgd.graphs.UndirectedExponential().peers(0, t, n=8) for t in (0, 1, 2)]
        [[1, 7], [2, 6], [4]]

    References:
        M. Assran et al., ICML 2019: the graph of their D-PSGD.
    """

    symmetric = True

    def period(self, n: int) -> int:
        return max(len(_powers(2, n)), 1)

    def peers(self, i: int, t: int, n: int) -> list[int]:
        hops = _in_turn(_powers(2, n), t, 1)
        return _others(i, [i + sign * hop for hop in hops for sign in (1, -1)], n)


@checked
@dataclass(frozen=True)
class Ring:
    """An undirected graph: node i exchanges with i ± 1 (mod n) in every step.

    Example:
        >>> hpcsgd.graphs.Ring().peers(0, t=0, n=8)
        [1, 7]

    References:
        X. Lian et al., NeurIPS 2017 (D-PSGD).
    """

    symmetric = True

    def period(self, n: int) -> int:
        return 1

    def peers(self, i: int, t: int, n: int) -> list[int]:
        return _others(i, [i + 1, i - 1], n)


@checked
@dataclass(frozen=True)
class Complete:
    """An undirected graph: every node exchanges with every other, so the mean is exact after one step.

    A rank sends (n−1)·M/K elements per step. An allreduce gives the same mean and sends less.

    Example:
        >>> hpcsgd.graphs.Complete().peers(0, t=0, n=4)
        [1, 2, 3]
    """

    symmetric = True

    def period(self, n: int) -> int:
        return 1

    def peers(self, i: int, t: int, n: int) -> list[int]:
        return _others(i, [i + hop for hop in range(1, n)], n)


@checked
@dataclass(frozen=True)
class BipartiteExponential:
    """An undirected graph: the a-th even node exchanges with the (a + 2^k − 1)-th odd node.

    In each step k has its next value. If n is odd, two even nodes share an odd one in every step.

    Example:
        >>> [hpcsgd.graphs.BipartiteExponential().peers(0, t, n=8) for t in (0, 1, 2)]
        [[1], [3], [7]]

    References:
        M. Assran et al., ICML 2019: the graph of their AD-PSGD; X. Lian et al., ICML 2018.
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
"""Graphs by their names in job files."""


def senders(graph: Graph, i: int, t: int, n: int) -> list[int]:
    """Return the nodes from which node i receives in step t.

    If edges go both ways, they equal the nodes that node i sends to, `graph.peers(i, t, n)`.

    Args:
        graph: The graph of the nodes.
        i: The node, 0 … n−1.
        t: The step, counted from 0.
        n: Number of nodes.

    Returns:
        The numbers of the nodes, in ascending order.

    Example:
        >>> hpcsgd.graphs.senders(hpcsgd.graphs.Exponential(), 0, t=1, n=8)
        [6]
    """
    return [j for j in range(n) if i in graph.peers(j, t, n)]


def _require_peers(per_step: int) -> None:
    if per_step < 1:
        raise UserError(
            f"peers = {per_step}: a group sends to at least 1 other in every step",
            key="peers",
            value=per_step,
        )


def _powers(base: int, n: int) -> list[int]:
    """Return base^0, base^1, … up to the largest that is at most n − 1."""
    powers: list[int] = []
    power = 1
    while power < n:
        powers.append(power)
        power *= base
    return powers


def _bipartite_hops(n: int) -> list[int]:
    """Return 2^k − 1 for each k that leads to a different odd node."""
    return [hop - 1 for hop in [1 << k for k in range(n.bit_length())] if hop <= n // 2]


def _in_turn(hops: list[int], t: int, count: int) -> list[int]:
    count = min(count, len(hops))
    return [hops[(t * count + k) % len(hops)] for k in range(count)]


def _others(i: int, nodes: list[int], n: int) -> list[int]:
    return [j for j in dict.fromkeys(node % n for node in nodes) if j != i]
