"""What a part of a method may do beside its own: all optional protocols, and who asks for them.

    Prepares   an averager acts before an update
    Late       an averager's results arrive some updates after they were asked for
    Stateful   a part has a memory, which a checkpoint keeps
    Staged     an averager is of several methods, which train one after the other

Three are what a part predicts of itself, for `hpcsgd.cost`, which adds them up:

    WithCommOps      the operations of a step or of a synchronization
    WithMemory      the bytes that it keeps from step to step
    WithSearch   the elements that an exchange looks through

They are three, since their parts differ: many send something, few keep vectors, and one exchange searches.
A part that does none of it has nothing to write.

A part that is around another one, or made of several, says so (`Wrapping`, `Composed`): each of those inside
is asked for itself, and whoever is around them passes nothing on. What is sent is the exception: a part
around another one may change the operations of that one, and so its `sends` has them all.
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
    """An averager that has something to do before an update."""

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Act before the update of step `s`, whose gradients have been averaged in the group.

        `vectors` are those that `average` is given after it. It may change them, and the gradients if
        `Traits.reads_gradients` says so. Collective.
        """
        ...


@runtime_checkable
class Late(Protocol):
    """An averager whose results arrive while training goes on, or that has work between two synchronizations.

    After each update it is asked whether it `is_due`, once; then either `average` or `begin` is called.
    """

    def is_due(self, s: StepContext, wanted: bool) -> bool:
        """Return whether `average` is to be called after this update, where the schedule said `wanted`; the
        same on every rank."""
        ...

    def begin(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Begin what there is to begin after an update after which `average` is not called. It leaves
        `vectors` alone, which are being gathered meanwhile. Collective."""
        ...

    def finish(self, vectors: Sequence[Tensor], s: StepContext, due: bool) -> None:
        """Take everything into `vectors` that is under way, and begin nothing that arrives later. `due`: what
        `is_due` returned. Collective."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A part of a method with a memory: all that a restart needs beside parameters and moments."""

    def state_dict(self) -> State:
        """Return it, without copies: whoever keeps it clones. Collective: messages under way are waited
        for."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go on from there, with the very tensors of `state`; of what is not in it, as new."""
        ...


@runtime_checkable
class Wrapping(Protocol):
    """A part of a method around another one: at this time, where these take turns."""

    @property
    def inner(self) -> Any: ...


@runtime_checkable
class Composed(Protocol):
    """A part of a method made of several, whose states are all kept."""

    @property
    def parts(self) -> Mapping[str, Any]: ...


@runtime_checkable
class Staged(Protocol):
    """An averager of several methods, which train one after the other."""

    @property
    def sequence(self) -> Sequence[tuple[int | None, Any]]:
        """Each method with its last step; None: nobody can tell beforehand, or it is the last method."""
        ...


@runtime_checkable
class WithCommOps(Protocol):
    """A part of a method that sends something: an exchange in a step, a schedule in a step, an averager at a
    meeting."""

    def comm_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        """Return the operations, those of the parts inside among them, for a model of these sizes."""
        ...


@runtime_checkable
class WithMemory(Protocol):
    """A part of a method that keeps vectors from one step to the next."""

    def memory_bytes(self, m: ModelLayout) -> float:
        """Bytes of a rank: the most that they are, of all that is not inside parts that tell for themselves;
        of a part of a meeting, where there are groups to meet."""
        ...


@runtime_checkable
class WithSearch(Protocol):
    """An exchange that looks for the largest elements in a step."""

    def elements_searched(self, m: ModelLayout) -> float:
        """Elements that a rank looks through, on the mean."""
        ...


def prepare(averager: Averager, vectors: Sequence[Tensor], s: StepContext) -> None:
    """Let `averager`, and then what is inside it, act before an update. Collective."""
    part: Any = averager
    while True:
        if isinstance(part, Prepares):
            part.prepare(vectors, s)
        if not isinstance(part, Wrapping):
            return
        part = part.inner


def is_due(averager: Averager, s: StepContext, wanted: bool) -> bool:
    """Return whether `averager` averages after this update: if that is `wanted`, unless it is late."""
    return averager.is_due(s, wanted) if isinstance(averager, Late) else wanted


def begin(averager: Averager, vectors: Sequence[Tensor], s: StepContext) -> None:
    """Begin what a late one has to begin after an update after which it does not average. Collective."""
    if isinstance(averager, Late):
        averager.begin(vectors, s)


def finish(averager: Averager, vectors: Sequence[Tensor], s: StepContext, due: bool) -> None:
    """Average for the last time: if that is `due`, or has been under way. Collective."""
    if isinstance(averager, Late):
        averager.finish(vectors, s, due)
    elif due:
        run_averager(averager, vectors, s)


def comm_ops(part: object, m: ModelLayout) -> list[CommOp]:
    """Return what `part` sends; of a part that sends nothing, none."""
    return list(part.comm_ops(m)) if isinstance(part, WithCommOps) else []


def memory_bytes(parts: Iterable[object], m: ModelLayout) -> float:
    """Return the bytes that these parts keep."""
    return sum(part.memory_bytes(m) for part in parts if isinstance(part, WithMemory))


def elements_searched(part: object, m: ModelLayout) -> float:
    """Return the elements that `part` looks through; where it searches nothing, 0."""
    return part.elements_searched(m) if isinstance(part, WithSearch) else 0.0
