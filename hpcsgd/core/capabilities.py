"""What a part of a method may be able to, for those who have to know: they ask for this, and for no class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import Averager, Step

BeforeBucket = Callable[[Bucket], None]


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


@runtime_checkable
class Piecemeal(Protocol):
    """An exchange that can tell whether it is through with each bucket by itself, and not with the last one
    only, so that one is updated while the next is on its way."""

    @property
    def piecemeal(self) -> bool: ...


def is_piecemeal(exchange: Any) -> bool:
    """False of one that cannot tell."""
    return isinstance(exchange, Piecemeal) and exchange.piecemeal


@runtime_checkable
class Regardless(Protocol):
    """An averager that can tell whether its `before_update` neither looks at gradients nor changes them, so
    that it may be called while they are on their way."""

    @property
    def regardless_of_gradients(self) -> bool: ...


def is_regardless_of_gradients(how: Any) -> bool:
    """False of one that cannot tell."""
    return isinstance(how, Regardless) and how.regardless_of_gradients


@runtime_checkable
class BucketByBucket(Protocol):
    """An averager that is through with one bucket after the other, so that one is gathered while the next is
    on its way. Whoever wraps one and moves w afterwards must not be one."""

    def one_by_one(self, s: Step, before: BeforeBucket) -> Iterator[Bucket]:
        """Does what a call does, with each bucket not until `before` has returned for it; gives each, in
        their order, once it is as the call leaves it."""
        ...


def one_by_one(how: Averager, s: Step, before: BeforeBucket) -> Iterator[Bucket]:
    """All of them at the end of one that is not through before."""
    if isinstance(how, BucketByBucket):
        yield from how.one_by_one(s, before)
        return
    for b in s.buckets:
        before(b)
    how(s)
    yield from s.buckets


def all_of(buckets: Iterator[Bucket]) -> None:
    """Until the last one is through."""
    for _ in buckets:
        pass


def nothing(_: Bucket) -> None:
    """Before a bucket that is ready."""


@runtime_checkable
class ByTime(Protocol):
    """A schedule that goes by t alone, and so gives its answer before the update as well as after it."""

    @property
    def by_time(self) -> bool: ...


def goes_by_time(when: Any) -> bool:
    """False of one that cannot tell."""
    return isinstance(when, ByTime) and when.by_time


@runtime_checkable
class Beginning(Protocol):
    """An averager whose meetings go on while groups train: one begins with what they have after an update,
    and arrives with a call after a later one."""

    def begin(self, s: Step) -> None:
        """All chunks are updated, and none arrives after this update: begin what is due to. Leaves w alone,
        which is being gathered meanwhile."""
        ...


def begin(how: Averager, s: Step) -> None:
    """What there is to begin, after an update after which `how` is not called."""
    if isinstance(how, Beginning):
        how.begin(s)


@runtime_checkable
class Late(Protocol):
    """An averager whose meetings may be under way when groups stop to meet by it."""

    def finish(self, s: Step, due: bool) -> None:
        """Wait for these meetings and take their results into the model; begin none. `due`: whether the
        schedule says that groups meet after this update. Collective."""
        ...


def finish(how: Averager, s: Step, due: bool) -> None:
    """Meet by `how` for the last time: if that is `due`, or has been under way."""
    if isinstance(how, Late):
        how.finish(s, due)
    elif due:
        how(s)


@runtime_checkable
class Measuring(Protocol):
    """An averager that notes D."""

    squared: float | None
    """At this position: ‖what groups brought − what they left with‖² of its last meeting."""
    beside: float
    """The same of what meets apart from its chunks; it counts in D."""


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
