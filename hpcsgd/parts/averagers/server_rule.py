"""What the parts of a parameter server do with each update, and how fast each group is.

These are the interfaces between `ParameterServer` and the method that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hpcsgd.core.step import StepContext
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.outer_schedules.base import OuterSchedule, OuterValues


class ServerRule(Protocol):
    """How the part of the server's model that a rank holds changes when it receives an update."""

    @property
    def vectors_per_part(self) -> int:
        """The number of vectors as long as the part that the rule keeps next to it."""
        ...

    def begin(self, part: Sequence[Tensor], tensors: ByTensor, P: int) -> None:
        """Start with `part`, in host memory, in which `tensors` lie and which P groups send updates to."""
        ...

    def apply(self, update: MessageBuffer, t: int) -> None:
        """Change the part by the change `update` of a group's model, which the group sends after step `t`."""
        ...

    def metrics(self, t: int) -> Mapping[str, float]:
        """Return what a group reports of the update that it sends after step `t`."""
        ...

    def vectors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the vectors that a checkpoint keeps, by name, each as long as the part."""
        ...

    def numbers(self) -> Mapping[str, Any]:
        """Return the numbers that a checkpoint keeps. They are the same for all parts between two steps."""
        ...

    def restore(self, vectors: Mapping[str, Sequence[Tensor]], numbers: Mapping[str, Any]) -> str:
        """Load what `vectors()` and `numbers()` returned, after `begin`.

        Return, as text, what starts anew because it does not fit; "" if all of it fits.
        """
        ...


class AddMean:
    """The rule that adds 1/P of each update: a learning rate acts as with averaged gradients."""

    vectors_per_part = 0

    def begin(self, part: Sequence[Tensor], tensors: ByTensor, P: int) -> None:
        self._part, self._P = part, P

    def apply(self, update: MessageBuffer, t: int) -> None:
        update.add_to(self._part, 1 / self._P)

    def metrics(self, t: int) -> Mapping[str, float]:
        return {}

    def vectors(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def numbers(self) -> Mapping[str, Any]:
        return {}

    def restore(self, vectors: Mapping[str, Sequence[Tensor]], numbers: Mapping[str, Any]) -> str:
        return ""


@dataclass(frozen=True)
class ServerRates:
    """The rate and the momentum of a rule: `lr` and `momentum`, which `schedule` replaces at each update."""

    lr: float
    momentum: float
    schedule: OuterSchedule | None

    def __post_init__(self) -> None:
        require("outer_lr", self.lr, 0 < self.lr < math.inf, "a finite rate > 0")
        require("outer_momentum", self.momentum, 0 <= self.momentum < 1, "a momentum ≥ 0 and < 1")

    def at(self, t: int, P: int) -> tuple[float, float]:
        """Return the rate and the momentum of an update that one of P groups sends after its step t."""
        values = OuterValues() if self.schedule is None else self.schedule.at(t, P)
        return (
            self.lr if values.lr is None else values.lr,
            self.momentum if values.momentum is None else values.momentum,
        )

    def metrics(self, t: int, P: int) -> Mapping[str, float]:
        """Return what a group reports of them, if they change."""
        return (
            {}
            if self.schedule is None
            else dict(zip(("outer_lr", "outer_momentum"), self.at(t, P), strict=True))
        )


def require(name: str, value: object, holds: bool, expected: str) -> None:
    """Raise `UserError` about the argument `name` of a method unless the condition `holds`."""
    if not holds:
        raise UserError(f"{name} = {value}: expected {expected}", key=name, value=value)


class Pace(Protocol):
    """How fast this group is, and what follows from how fast the fastest group is."""

    def pause(self) -> None:
        """Stop the measurement until the next step, because the group waits for others now."""
        ...

    def seconds_per_step(self) -> float:
        """Return the seconds of a step since the last synchronization; 0.0 if they are not known yet."""
        ...

    def adapt(self, fastest: float, s: StepContext) -> None:
        """Adapt to the seconds per step of the `fastest` group, and measure anew. Collective in the group."""
        ...
