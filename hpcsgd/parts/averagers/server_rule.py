"""What the parts of a parameter server do with each update, and how fast each group is.

These are the interfaces between `ParameterServer` and the method that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hpcsgd.core.step import StepContext
from hpcsgd.parts.averagers.message_buffer import MessageBuffer


class ServerRule(Protocol):
    """How the part of the server's model that a rank holds changes when it receives an update."""

    @property
    def vectors_per_part(self) -> int:
        """The number of vectors as long as the part that the rule keeps next to it."""
        ...

    def begin(self, part: Sequence[Tensor], P: int) -> None:
        """Start with `part`, in host memory, which P groups send updates to."""
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

    def begin(self, part: Sequence[Tensor], P: int) -> None:
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
