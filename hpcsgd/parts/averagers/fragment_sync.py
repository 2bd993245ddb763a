"""Fragments that meet by themselves: each has an averager, with its memory, and the meeting under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpcsgd.core.averager import Averager, run_averager
from hpcsgd.core.method import remembering
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.parts.averagers.fragments import Fragment
from hpcsgd.parts.averagers.pending_average import PendingAverage

LEFT = "left"
"""What meetings under way have left, among the vectors of the state; others are of a part of the averager."""


@dataclass
class FragmentSync:
    """The meetings of one fragment."""

    fragment: Fragment
    how: Averager
    pending: PendingAverage | None = None
    """The one under way."""

    distance: float | None = None
    """At this position, as it last met, where its averager measures D: `StepContext.squared_distance`."""

    def synchronize(self, vectors: list[Tensor], mine: StepContext, others: Sequence[FragmentSync]) -> None:
        """The D that is noted is that of all fragments as they last met; none before all have."""
        distances = [other.distance for other in others]
        mine.squared_elsewhere = sum(x for x in distances if x is not None)
        run_averager(self.how, vectors, mine)
        self.distance = mine.squared_distance
        if None in distances:
            mine.metrics.pop("distance", None)

    def saved(self) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
        """What belongs to elements, of the meeting, once it is over, and of the averager's memory; and the
        rest of that, by role."""
        vectors: dict[str, list[Tensor]] = {}
        if self.pending is not None:
            self.pending.wait()
            vectors[LEFT] = self.pending.shards
        states = {role: part.state_dict() for role, part in remembering(self.how).items()}
        for role, state in states.items():
            vectors |= {f"{role} {name}": xs for name, xs in state.sharded.items()}
        return vectors, {role: state.replicated for role, state in states.items()}

    def apply(self, vectors: Mapping[str, list[Tensor]], rest: Mapping[str, Any]) -> None:
        """Of the averager's memory, as `saved` has it."""
        for role, part in remembering(self.how).items():
            prefix = f"{role} "
            mine = {k.removeprefix(prefix): xs for k, xs in vectors.items() if k.startswith(prefix)}
            part.load_state_dict(State(replicated=rest[role], sharded=mine).cloned())
