"""The synchronizations of one fragment of the model: its averager, state and pending average."""

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
"""The name, in a saved state, of the vectors that pending averages have produced.

Other names belong to parts of the averager.
"""


@dataclass
class FragmentSync:
    """One fragment of the model, with its averager and its pending average."""

    fragment: Fragment
    how: Averager
    pending: PendingAverage | None = None
    """The average under way, if there is one."""

    distance: float | None = None
    """`StepContext.squared_distance` of the last synchronization on this rank, if the averager measures D."""

    def synchronize(self, vectors: list[Tensor], mine: StepContext, others: Sequence[FragmentSync]) -> None:
        """Average the fragment's `vectors`.

        The reported distance D covers all fragments, each as of its last synchronization. It is not reported
        before every fragment has been synchronized once.
        """
        distances = [other.distance for other in others]
        mine.squared_elsewhere = sum(x for x in distances if x is not None)
        run_averager(self.how, vectors, mine)
        self.distance = mine.squared_distance
        if None in distances:
            mine.metrics.pop("distance", None)

    def saved(self) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
        """Wait for the pending average; return the vectors of the state, and the rest by the part's role.

        The vectors have one number per element of the fragment. They are the result of the pending average
        and those in the averager's state.
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
        """Load the averager's state, as `saved` returns it."""
        for role, part in remembering(self.how).items():
            prefix = f"{role} "
            mine = {k.removeprefix(prefix): xs for k, xs in vectors.items() if k.startswith(prefix)}
            part.load_state_dict(State(replicated=rest[role], sharded=mine).cloned())
