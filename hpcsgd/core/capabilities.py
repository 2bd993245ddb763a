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


def leaves_mean(how: Any) -> bool:
    """False of one that cannot tell."""
    return isinstance(how, LeavesMean) and how.leaves_mean


@runtime_checkable
class OfChunks(Protocol):
    """An averager that goes by nothing but the chunks `own`, the step's number and what it remembers of
    earlier meetings, over `group` and `cross`: it may be given copies of chunks, or of parts of them, while
    the group trains on. What it does before updates has no effect on these."""

    @property
    def of_chunks(self) -> bool: ...


def of_chunks(how: Any) -> bool:
    """False of one that cannot tell."""
    return isinstance(how, OfChunks) and how.of_chunks
