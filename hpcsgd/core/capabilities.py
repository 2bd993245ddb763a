"""What a part of a method may be able to, for those who have to know: they ask for this, and for no class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Counting(Protocol):
    """A part of a method that notes small whole numbers: of these it is kept how often which one came, over
    all ranks, and not what this rank noted in every step."""

    @property
    def counted(self) -> Sequence[str]:
        """Their names in `Step.notes`."""
        ...


@runtime_checkable
class ForPeers(Protocol):
    """An averager that averages with `Job.peers`, and not with the groups of this job."""

    @property
    def for_peers(self) -> bool: ...


@runtime_checkable
class Periodic(Protocol):
    """A schedule with a meeting after every so many steps, come what may."""

    @property
    def steps_between(self) -> int: ...


@runtime_checkable
class Foreseen(Protocol):
    """A schedule that can tell how often groups are going to meet."""

    @property
    def share(self) -> float | None:
        """Of all steps; None where that depends on one that cannot tell."""
        ...


@runtime_checkable
class Threshold(Protocol):
    """A schedule with a meeting where something has changed by `delta` or more in any group."""

    @property
    def delta(self) -> float: ...

    @property
    def changes(self) -> Tensor:
        """By how much in each group (P numbers) in the last step; the same on every rank."""
        ...


@runtime_checkable
class LeavesMean(Protocol):
    """An averager that can tell whether it leaves all groups with the mean of their models, and everything
    else, moments above all, as it was."""

    @property
    def leaves_mean(self) -> bool: ...


@runtime_checkable
class KeepsGradients(Protocol):
    """An exchange with a memory, which can tell whether that is of gradients."""

    @property
    def keeps_gradients(self) -> bool: ...


@runtime_checkable
class Referring(Protocol):
    """An averager that sends differences to what all groups have in common since the last meeting."""

    def refer_to(self, common: Sequence[Tensor]) -> None:
        """That is `common`, like its chunks: somebody has moved on from what it left, alike in all groups."""
        ...


def leaves_mean(how: Any) -> bool:
    """False of one that cannot tell."""
    return isinstance(how, LeavesMean) and how.leaves_mean
