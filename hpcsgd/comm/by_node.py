"""Collectives of ranks that share nodes, L on each of H: what crosses the network does so once for a node.

The runs of a vector are numbered as ranks are, h·L + l for place l of node h.

    allgather       across nodes   the ranks of one place l give each other their runs (·, l)
                    in the node    everybody gives the others what it has fetched
    reduce_scatter  in the node    rank l adds up, for its node, the runs (·, l) of all
                    across nodes   the ranks of one place add up what their nodes have

So a node is sent (H−1)/H of a vector. A ring of all ranks takes (H·L−1)/(H·L) of it over each link, and an
all-to-all L·(H−1)/H. Sums are ours: places first, then nodes, each in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcsgd.comm import sums
from hpcsgd.comm.backend import Backend

SHORTEST = 1 << 17
"""Bytes of a vector: of shorter ones one more message costs as much as it saves."""


def levels(nodes: Sequence[int]) -> tuple[int, int] | None:
    """H and L of ranks of which rank r is on `nodes[r]`; None where they are not H runs of L, or where
    either is 1."""
    H = len(set(nodes))
    L, rest = divmod(len(nodes), H)
    runs = [nodes[h * L : (h + 1) * L] for h in range(H)]
    uneven = rest > 0 or any(len(set(run)) > 1 for run in runs)
    return None if uneven or H == 1 or L == 1 else (H, L)


class ByNode:
    """Both levels of a communicator; made by all of its ranks at once."""

    def __init__(self, ranks: Backend, H: int, L: int) -> None:
        h, l = divmod(ranks.rank, L)  # noqa: E741
        self.H, self.L = H, L
        self._inside, self._across = ranks.split(h, l), ranks.split(l, h)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        """As `Backend.allgather`; takes room for another `out`."""
        rows = out.new_empty(self.L, self.H, x.numel())
        fetched = rows[self._inside.rank]
        self._across.allgather(fetched, x)
        self._inside.allgather(rows, fetched)
        out.view(self.H, self.L, -1).copy_(rows.transpose(0, 1))

    def reduce_scatter(self, out: Tensor, x: Tensor, mean: bool) -> None:
        """As `Backend.reduce_scatter` of a sum or mean; takes room for two more `x`."""
        by_place = x.view(self.H, self.L, -1).transpose(0, 1).contiguous()
        of_node = x.new_empty(self.H, out.numel())
        sums.reduce_scatter(self._inside, of_node, by_place, "sum")
        sums.reduce_scatter(self._across, out, of_node, "sum")
        if mean:
            out.div_(self.H * self.L)


class Levels:
    """The levels of a communicator whose rank r is on `nodes[r]`, which are made when they are first used."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._levels = levels(nodes)
        self._made: ByNode | None = None

    def of(self, ranks: Backend, whole: Tensor) -> ByNode | None:
        """Return those of `ranks`, or None if there is one level, or `whole` is too short; collective."""
        if self._levels is None or whole.nbytes < SHORTEST:
            return None
        if self._made is None:
            self._made = ByNode(ranks, *self._levels)
        return self._made
