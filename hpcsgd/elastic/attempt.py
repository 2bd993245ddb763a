"""The outcome of an attempt to average, for one rank and for a replica group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from hpcsgd.comm import Communicator
from hpcsgd.elastic.endings import Over
from hpcsgd.elastic.register import Register
from hpcsgd.errors import JobError


class State(IntEnum):
    """The state of a rank in an attempt to average. The state of a group is the maximum over its ranks."""

    FINE = 0
    OUTSIDE = 1
    """The rank is in no running generation, or had an error in it."""
    EVICTED = 2
    """The other groups have continued without this one."""
    OVER = 3
    """The other groups have finished the training."""
    UNLIKE = 4
    """This group was given another model or method than the others."""


def worst_of(group: Communicator, mine: State, unlike: JobError | None) -> State:
    """Return the worst state of the ranks in `group`; `mine` is that of this rank. Collective.

    If it is `OVER`, raises `Over`. If it is `UNLIKE`, raises the error `unlike` of a rank in that state.
    """
    state = torch.tensor([mine], dtype=torch.int32, device="cpu")
    group.allreduce(state, "max").wait()
    if (worst := State(int(state.item()))) is State.OVER:
        raise Over
    if worst is State.UNLIKE:
        errors: list[JobError | None] = group.gather_objects(unlike)
        raise next(error for error in errors if error is not None)
    return worst


@dataclass(frozen=True)
class Outcome:
    """What a rank knows about the end of a round: by default, that the round was aborted."""

    registers: tuple[Register, Register] | None = None
    """The registers during and after the round, if it was committed."""
    is_unknown: bool = False
    """True if the round may have been committed."""


def outcome(g: int, r: int, during: Register, after: Register, *, voted: bool) -> Outcome:
    """Return the outcome of the round after `r` committed rounds in generation `g`.

    `voted`: this rank has voted to commit it. The registers are those during the round and after it. If the
    connection was broken meanwhile, the rank may have missed others between them.
    """
    if (after.generation, after.rounds) == (g, r + 1):
        return Outcome((during, after))
    aborted = after.rounds == r or (after.generation, after.began) == (g + 1, r)
    return Outcome(is_unknown=voted and not aborted)
