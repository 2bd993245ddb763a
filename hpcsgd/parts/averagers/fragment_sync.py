"""The synchronizations of one fragment of the model: its averager, state and pending average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hpcsgd.core.averager import Averager, run_averager
from hpcsgd.core.method import remembering
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.parts.averagers.fragments import Fragment
from hpcsgd.parts.averagers.pending_average import PendingAverage

LEFT = "left"
"""The name of the results of pending averages in a saved state.

All other names of vectors in the state belong to parts of the averager.
"""


@dataclass
class FragmentSync:
    """One fragment of the model, with its averager and its pending average."""

    fragment: Fragment
    how: Averager
    pending: PendingAverage | None = None
    """The average of this fragment that is under way, if there is one."""

    distance: float | None = None
    """The fragment's part of D² on this rank at its last synchronization (`StepContext.squared_distance`).

    None before the first synchronization, or if the averager does not measure D.
    """

    def step(self, s: StepContext) -> StepContext:
        """Return step `s` for this fragment's vectors."""
        return replace(s, cuts=self.fragment.cuts)

    def synchronize(self, vectors: list[Tensor], mine: StepContext, others: Sequence[FragmentSync]) -> None:
        """Average the fragment's `vectors` over the groups, in place; `others` are the other fragments.

        The reported distance D covers all fragments, each as of its last synchronization. It is not reported
        before every fragment has been synchronized once. `mine` gets the metrics.
        """
        distances = [other.distance for other in others]
        mine.squared_elsewhere = sum(x for x in distances if x is not None)
        run_averager(self.how, vectors, mine)
        self.distance = mine.squared_distance
        if None in distances:
            mine.metrics.pop("distance", None)

    def parts_of(self, names: Iterable[str], vectors: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Return the fragment's parts of those of `vectors`, of the whole model, that are in `names`."""
        return {name: self.fragment.of(vectors[name]) for name in names if name in vectors}

    def saved(self) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
        """Wait for the pending average; return the state as vectors by name, and other values by role.

        The vectors have one number per element of the fragment. They are the result of the pending average
        and the vectors in the state of the averager's parts. The other values are those of each part.
        """
        vectors: dict[str, list[Tensor]] = {}
        if self.pending is not None:
            self.pending.wait()
            vectors[LEFT] = self.pending.shards
        states = {role: part.state_dict() for role, part in remembering(self.how).items()}
        for role, state in states.items():
            vectors |= {f"{role} {name}": xs for name, xs in state.sharded.items()}
        return vectors, {role: state.replicated for role, state in states.items()}

    def apply(self, vectors: Mapping[str, list[Tensor]], rest: Mapping[str, Any]) -> None:
        """Load the state of the averager's parts: vectors by name and other values by role, as in `saved`."""
        for role, part in remembering(self.how).items():
            prefix = f"{role} "
            mine = {k.removeprefix(prefix): xs for k, xs in vectors.items() if k.startswith(prefix)}
            part.load_state_dict(State(replicated=rest[role], sharded=mine).cloned())
