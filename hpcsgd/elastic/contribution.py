"""What a replica group adds to a mean in place of its tensors, and what all groups learn of it first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hpcsgd.elastic.register import Register, Report
from hpcsgd.elastic.ring import TcpRing

ALL_PARTS, NO_OPINION = 0.0, -1.0
"""The codes of a group that wants all parts averaged, and of one that leaves the choice to the others."""


@dataclass(frozen=True)
class Facts:
    """What the groups of a round learn of each other before they average."""

    norms: Mapping[int, Sequence[float]]
    """The `norms` of each group in the mean, by group."""
    weights: Mapping[int, Sequence[float]]
    """The `weights` of each group in the mean, by group."""
    t: int
    """The updates that the groups have done that have missed no round."""
    part: int | None
    """The index of the part to average; None: all parts."""


class Contribution(Protocol):
    """What a group adds to a mean in place of its tensors; each attempt to average calls it anew.

    The tensors may form several parts, of which a round averages one or all.
    """

    norms: Sequence[float]
    """A number of this group for each part, which all groups get."""
    weights: Sequence[float]
    """The weight of this group in the mean of each part, which all get; empty: all groups weigh alike."""
    part: int | None
    """The index of the part that this group would average in this round; None: all parts."""
    shared: Sequence[Tensor]
    """Tensors that are the same in all groups in the mean. In the first round of a generation all groups get
    those of the first group in the mean that has missed no round."""
    late_rounds: int
    """The number of rounds that this group may miss, and still count when it is back; 0: none."""

    def __call__(self, facts: Facts, newest: Sequence[Tensor] = ()) -> Sequence[Tensor | None]:
        """Return the tensors to average, with None in place of those that this round does not average.

        Their plain mean is taken, so a weight is a factor of them. For a group that has missed rounds,
        `newest` are the `shared` tensors of one that has not. Only the shard of them that this rank averages
        is valid.
        """
        ...


def contributed(
    added: Contribution,
    index: int,
    t: int,
    report: Report,
    here: Register,
    ring: TcpRing,
    newest: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Return the tensors that `added` makes for group `index` in the round of the register `here`.

    The group has done `t` updates. `newest`: see `Contribution`. Collective in `ring`. Raises `OSError` if a
    connection breaks.
    """
    mine = own_row(added, index, t, here, stops=report.leaving, saves=report.saving)
    rows = dict(zip(here.replica_groups, ring.gather(mine), strict=True))
    return added(facts_of(rows, here, parts=len(added.norms)), newest)


def own_row(
    contribution: Contribution, index: int, t: int, here: Register, *, stops: bool, saves: bool
) -> list[float]:
    """Return what group `index` tells the others of the register `here`: its norms, weights, `t` and part.

    A group that has missed rounds, or has no samples, leaves the choice of the part to the others. A group
    that `stops` after the round needs all parts. So does one that `saves` the model after it, if it has
    missed none. So does a late group without samples, because it does not count in later rounds.
    """
    is_current = index in here.up_to_date
    norms = contribution.norms if index in here.counting else [0.0] * len(contribution.norms)
    numbers = [*norms, *contribution.weights, t]
    counts_only_now = index in here.late and index not in here.sharing
    if stops or counts_only_now or (is_current and (saves or contribution.part is None)):
        return [*numbers, ALL_PARTS]
    return [*numbers, NO_OPINION if contribution.part is None or not is_current else contribution.part + 1]


def facts_of(rows: Mapping[int, Sequence[float]], here: Register, parts: int) -> Facts:
    """Return the facts that the `rows` of all members of the register `here` state, of a model of `parts`.

    All parts are averaged if any group needs that.
    """
    *_, t, part = rows[min(here.up_to_date)]
    needs_all = any(row[-1] == ALL_PARTS for row in rows.values())
    counting = {group: row for group, row in rows.items() if group in here.counting}
    norms = {group: row[:parts] for group, row in counting.items()}
    weights = {group: row[parts:-2] for group, row in counting.items()}
    return Facts(norms, weights, round(t), None if needs_all else round(part) - 1)
