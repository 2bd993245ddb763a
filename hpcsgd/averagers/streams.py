"""Fragments that meet by themselves: each has an averager, with its memory, and the meeting under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpcsgd.averagers.fragments import Fragment
from hpcsgd.averagers.under_way import Meeting
from hpcsgd.core.capabilities import Measuring
from hpcsgd.core.method import State, parts_of, remembering
from hpcsgd.core.step import Averager, Step

LEFT = "left"
"""What meetings under way have left, among the vectors of the state; others are of a part of the averager."""


@dataclass
class Stream:
    """The meetings of one fragment."""

    fragment: Fragment
    how: Averager
    meeting: Meeting | None = None
    """The one under way."""

    @property
    def measuring(self) -> Measuring | None:
        """What of the averager notes D."""
        return next((part for _, part in parts_of("how", self.how) if isinstance(part, Measuring)), None)

    def meet(self, mine: Step, others: Sequence[Stream]) -> None:
        """The D that is noted is that of all fragments as they last met; none before all have."""
        if (measuring := self.measuring) is None:
            self.how(mine)
            return
        distances = [other.distance for other in others]
        measuring.beside = sum(x for x in distances if x is not None)
        self.how(mine)
        if None in distances:
            mine.notes.pop("distance", None)

    @property
    def distance(self) -> float | None:
        """At this position, as it last met: `Measuring.squared`."""
        return None if (measuring := self.measuring) is None else measuring.squared

    def saved(self) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
        """What belongs to elements, of the meeting, once it is over, and of the averager's memory; and the
        rest of that, by role."""
        vectors: dict[str, list[Tensor]] = {}
        if self.meeting is not None:
            self.meeting.wait()
            vectors[LEFT] = self.meeting.chunks
        states = {role: part.state_dict() for role, part in remembering(self.how).items()}
        for role, state in states.items():
            vectors |= {f"{role} {name}": xs for name, xs in state.get("chunks", {}).items()}
        return vectors, {role: state.get("same", {}) for role, state in states.items()}

    def take_up(self, vectors: Mapping[str, list[Tensor]], rest: Mapping[str, Any]) -> None:
        """Of the averager's memory, as `saved` has it."""
        for role, part in remembering(self.how).items():
            prefix = f"{role} "
            mine = {k.removeprefix(prefix): xs for k, xs in vectors.items() if k.startswith(prefix)}
            state: State = {"same": rest[role]}
            part.load_state_dict({**state, "chunks": mine} if mine else state)
