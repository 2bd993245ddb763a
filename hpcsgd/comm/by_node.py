"""Collectives of ranks on H nodes, L on each: data crosses the network once per node.

The parts of a vector are numbered like the ranks: part h·L + l belongs to local rank l of node h.

    allgather       across nodes   ranks with the same l exchange their own parts
                    in the node    each rank gives the others all parts that it now has
    reduce_scatter  in the node    rank l sums the parts of local ranks l, of all nodes, over its node's ranks
                    across nodes   ranks with the same l add up the sums of their nodes

So a node receives (H−1)/H of a vector. A ring of all ranks sends (H·L−1)/(H·L) of it over each link, and an
all-to-all L·(H−1)/H. The sums are computed here: over local ranks first, then over nodes, each in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcsgd.comm import sums
from hpcsgd.comm.backend import Backend

SHORTEST = 1 << 17
"""Bytes of the shortest vector for which two levels are used. Below, they cost as much time as they save."""


def levels(nodes: Sequence[int]) -> tuple[int, int] | None:
    """Return H and L if rank r is on `nodes[r]`; None unless H > 1 nodes have L > 1 ranks each, in order."""
    H = len(set(nodes))
    L, rest = divmod(len(nodes), H)
    runs = [nodes[h * L : (h + 1) * L] for h in range(H)]
    uneven = rest > 0 or any(len(set(run)) > 1 for run in runs)
    return None if uneven or H == 1 or L == 1 else (H, L)


class ByNode:
    """Collectives in two levels, in nodes and across nodes. Making one is collective over `ranks`."""

    def __init__(self, ranks: Backend, H: int, L: int) -> None:
        h, l = divmod(ranks.rank, L)  # noqa: E741
        self.H, self.L = H, L
        self._inside, self._across = ranks.split(h, l), ranks.split(l, h)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        """Do what `Backend.allgather` does; needs additional memory of the size of `out`."""
        rows = out.new_empty(self.L, self.H, x.numel())
        fetched = rows[self._inside.rank]
        self._across.allgather(fetched, x)
        self._inside.allgather(rows, fetched)
        out.view(self.H, self.L, -1).copy_(rows.transpose(0, 1))

    def reduce_scatter(self, out: Tensor, x: Tensor, mean: bool) -> None:
        """Do what `Backend.reduce_scatter` does for a sum or mean; needs additional memory of 2 × `x`."""
        by_place = x.view(self.H, self.L, -1).transpose(0, 1).contiguous()
        of_node = x.new_empty(self.H, out.numel())
        sums.reduce_scatter(self._inside, of_node, by_place, "sum")
        sums.reduce_scatter(self._across, out, of_node, "sum")
        if mean:
            out.div_(self.H * self.L)


class Levels:
    """The two levels of a communicator whose rank r is on `nodes[r]`, made at their first use."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._levels = levels(nodes)
        self._made: ByNode | None = None

    def of(self, ranks: Backend, whole: Tensor) -> ByNode | None:
        """Return the levels of `ranks`; None if there is only one, or `whole` is too short. Collective."""
        if self._levels is None or whole.nbytes < SHORTEST:
            return None
        if self._made is None:
            self._made = ByNode(ranks, *self._levels)
        return self._made
