"""The optional protocols of the parts of a method, and functions that use them.

    Prepares   an averager acts before an update
    Late       an averager's results arrive some updates after it began
    Stateful   a part has state, which a checkpoint keeps
    Staged     an averager consists of several methods, which train one after the other

Three protocols predict the cost of a part. `hpcsgd.cost` adds their results up:

    WithCommOps   the operations of a step or of a synchronization
    WithMemory    the bytes that a part keeps from step to step
    WithSearch    the elements that a gradient reduction searches

They are separate because different parts implement them: many send something, few keep vectors, and one
gradient reduction searches. A part that does none of these implements none of the three.

A part around other parts implements `Wrapping` or `Composed`. Callers then find the parts inside and use them
directly; the outer part forwards no calls to them. `WithCommOps` is the exception: an outer part may change
the operations of an inner one, so the outer part's `comm_ops` includes those of all parts inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpcsgd.core.averager import Averager, run_averager
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout


@runtime_checkable
class Prepares(Protocol):
    """An averager that also acts before an update, for example on the gradients."""

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Act before the update of step `s`, whose gradients have been averaged in the group.

        `vectors` are the vectors that are passed to `average` after the update. This call may change them,
        and, if `Traits.reads_gradients` is True, the gradients. If `s.in_step` is False, `average` follows
        without an update, and there are no gradients. Collective.
        """
        ...


@runtime_checkable
class Late(Protocol):
    """An averager that communicates after updates without a synchronization, too.

    After each update `is_due` is called once. If it returns True, `average` is called, otherwise `begin`.
    """

    def is_due(self, s: StepContext, wanted: bool) -> bool:
        """Return whether `average` is to be called after this update of step `s`; the same on every rank.

        `wanted`: the schedule's decision, True for a synchronization.
        """
        ...

    def begin(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Begin new work after an update for which `average` is not called. Collective.

        It must not change `vectors`, because they are being gathered meanwhile. `s` is the step.
        """
        ...

    def finish(self, vectors: Sequence[Tensor], s: StepContext, due: bool) -> None:
        """Write all pending results into `vectors`, and begin no average that would end later. Collective.

        `s` is the step, and `due` is what `is_due` returned for it.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """A part of a method with state: what a restart needs in addition to parameters and optimizer state."""

    def state_dict(self) -> State:
        """Return the state without copies, so a caller that keeps it must clone it.

        Collective: it waits for messages under way.
        """
        ...

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, using its tensors themselves. Whatever `state` lacks starts anew."""
        ...


@runtime_checkable
class Wrapping(Protocol):
    """A part of a method around one other part, `inner`, which may be replaced during a training."""

    @property
    def inner(self) -> Any: ...


@runtime_checkable
class Composed(Protocol):
    """A part of a method made of several parts, all of which keep their states."""

    @property
    def parts(self) -> Mapping[str, Any]: ...


@runtime_checkable
class Staged(Protocol):
    """An averager of several methods, which train one after the other."""

    @property
    def sequence(self) -> Sequence[tuple[int | None, Any]]:
        """Each method with its last step; None if that is not known in advance, or for the last method."""
        ...


@runtime_checkable
class WithCommOps(Protocol):
    """A part of a method that communicates, with its predicted communication operations.

    A gradient reduction or a schedule communicates in each step, an averager at each synchronization.
    """

    def comm_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """Return the operations for the model `m`, including those of the parts inside."""
        ...


@runtime_checkable
class WithMemory(Protocol):
    """A part of a method that keeps vectors from one step to the next."""

    def memory_bytes(self, m: ModelLayout) -> float:
        """Return the peak bytes that this part keeps on one rank for the model `m`.

        Parts inside that are `WithMemory` themselves do not count. For an averager: the bytes if there are
        other groups to average with.
        """
        ...


@runtime_checkable
class WithSearch(Protocol):
    """A gradient reduction that searches for the largest elements in a step."""

    def elements_searched(self, m: ModelLayout) -> float:
        """Return the mean number of elements of the model `m` that a rank searches."""
        ...


def prepare(averager: Averager, vectors: Sequence[Tensor], s: StepContext) -> None:
    """Call `prepare` of `averager` and then of the parts inside it. Collective."""
    part: Any = averager
    while True:
        if isinstance(part, Prepares):
            part.prepare(vectors, s)
        if not isinstance(part, Wrapping):
            return
        part = part.inner


def is_due(averager: Averager, s: StepContext, wanted: bool) -> bool:
    """Return whether `averager` averages after this update: what a `Late` one decides, else `wanted`."""
    return averager.is_due(s, wanted) if isinstance(averager, Late) else wanted


def begin(averager: Averager, vectors: Sequence[Tensor], s: StepContext) -> None:
    """Call `begin` of a `Late` averager, after an update without averaging. Collective."""
    if isinstance(averager, Late):
        averager.begin(vectors, s)


def finish(averager: Averager, vectors: Sequence[Tensor], s: StepContext, due: bool) -> None:
    """Average once more if that is `due`, and write all pending averages into `vectors`. Collective."""
    if isinstance(averager, Late):
        averager.finish(vectors, s, due)
    elif due:
        run_averager(averager, vectors, s)


def comm_ops(part: object, m: ModelLayout) -> list[CommOp]:
    """Return the communication operations of `part`; none if it sends nothing."""
    return list(part.comm_ops(m)) if isinstance(part, WithCommOps) else []


def memory_bytes(parts: Iterable[object], m: ModelLayout) -> float:
    """Return the bytes that all `parts` together keep from one step to the next."""
    return sum(part.memory_bytes(m) for part in parts if isinstance(part, WithMemory))


def elements_searched(part: object, m: ModelLayout) -> float:
    """Return the number of elements that `part` searches, 0 if it searches nothing."""
    return part.elements_searched(m) if isinstance(part, WithSearch) else 0.0
