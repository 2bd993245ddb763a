"""Who talks to whom when groups gossip; the mixing matrices that follow are in `mixing`.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019
("the SGP paper" elsewhere), section 2 and appendix A. A graph of n nodes may change from step to step; every
one here is right for every n, not only for powers of two.
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
    """Whom each of n nodes, 0 … n−1, talks to in step t = 0, 1, …: what `sgp` and `d_psgd` gossip over.

    A class with these three is one, and may be given as `graph`.

    Not to be confused with autograd's graph of a computation; a node is a group here.

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
        """Whether all edges go both ways."""
        ...

    def period(self, n: int) -> int:
        """After so many steps among `n` nodes it begins again."""
        ...

    def peers(self, i: int, t: int, n: int) -> list[int]:
        """Whom node `i` of `n` sends to in step `t`: never itself, nobody twice."""
        ...


@checked
@dataclass(frozen=True)
class Exponential:
    """Directed: with p peers node i sends to i + j·(p+1)^k (mod n), j = 1 … p, one k a step, in turn.

    With one peer these are the paper's distances 1, 2, 4, …, with more those of its authors' code. The mean
    is exact after k + 1 steps where n = m·(p+1)^k with m ≤ p + 1. A node that two distances lead to counts
    once, and none leads home: for some n the last k has fewer than p peers.

    Not to be confused with `PowersOfTwo`, the same for one peer, nor with `UndirectedExponential`.

    Args:
        per_step: p, peers in a step, at least 1. Default 1, which sends least.

    Raises:
        UserError: for less than 1 peer.

    Example:
        >>> [hpcsgd.graphs.Exponential(2).peers(0, t, n=9) for t in (0, 1)]
        [[1, 2], [3, 6]]

    Source:
        M. Assran et al., ICML 2019, appendix A, and their code.
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


@checked
@dataclass(frozen=True)
class PowersOfTwo:
    """Directed: node i sends to i + 2^k (mod n), some of the distances 2^0 … 2^⌊log2(n−1)⌋ in each step, in
    turn.

    With one peer it is `Exponential`; with two it needs more steps to the mean for most n.

    Not to be confused with `Exponential(per_step=2)`, whose distances are powers of three and their doubles.

    Args:
        per_step: peers in a step, at least 1. Default 1.

    Raises:
        UserError: for less than 1 peer.

    Example:
        >>> [hpcsgd.graphs.PowersOfTwo(2).peers(0, t, n=9) for t in (0, 1)]
        [[1, 2], [4, 8]]

    Source:
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
    """Both ways: node i talks to i ± 2^k (mod n), one distance a step, in turn.

    Not to be confused with `PowersOfTwo`, where i sends to i + 2^k alone.

    Example:
        >>> [hpcsgd.graphs.UndirectedExponential().peers(0, t, n=8) for t in (0, 1, 2)]
        [[1, 7], [2, 6], [4]]

    Source:
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
    """Both ways: node i talks to i ± 1 (mod n), in every step.

    Not to be confused with the rings of `ensemble_sync`, in which living groups pass on sums.

    Example:
        >>> hpcsgd.graphs.Ring().peers(0, t=0, n=8)
        [1, 7]

    Source:
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
    """Both ways: everybody talks to everybody in every step, so that the mean is exact after one.

    Not to be confused with an allreduce, which has the mean with less to send: (n−1)·M/K here.

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
    """Both ways, between even and odd nodes only: the a-th even one and the odd ones number a + 2^k − 1, in
    turn.

    Where n is odd, two even nodes share an odd one in every step.

    Not to be confused with what `ad_psgd` does: partners of even groups are drawn at random there.

    Example:
        >>> [hpcsgd.graphs.BipartiteExponential().peers(0, t, n=8) for t in (0, 1, 2)]
        [[1], [3], [7]]

    Source:
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
"""As job files call them."""


def senders(graph: Graph, i: int, t: int, n: int) -> list[int]:
    """From whom node i receives in step t.

    Not to be confused with `Graph.peers`, whom it sends to; the same where edges go both ways.

    Args:
        graph: of the nodes.
        i: the node, 0 … n−1.
        t: the step, counted from 0.
        n: how many nodes there are.

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
    """base^0, base^1, … up to the largest that is at most n − 1."""
    powers: list[int] = []
    power = 1
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
