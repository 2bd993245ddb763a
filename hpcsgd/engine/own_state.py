"""Whose state a `state_dict()` is: of many methods each rank has its own, and another one's is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import fitted
from hpcsgd.core.state import State
from hpcsgd.core.topology import Job
from hpcsgd.errors import UserError


def place(job: Job) -> dict[str, int]:
    """Return where a state is saved: by which rank, of P groups of K."""
    return {"P": job.P, "K": job.K, "rank": job.rank}


def loadable(
    state_dict: Mapping[str, Any], job: Job, buckets: Sequence[Bucket], *, groups_are_alike: bool
) -> dict[str, State]:
    """Return the method's state for this rank, of a `state_dict` of a DistributedOptimizer.

    Inside a group the optimizer's state is the same on all ranks, and where `groups_are_alike` in all groups.

    Raises:
        UserError: If the rank that saved it has other state than this one has, on as many ranks.
    """
    ours = state_dict["hpcsgd"]
    if "place" not in ours:
        raise UserError("this state_dict is of an older version of hpcsgd")
    saved, states = ours["place"], {role: State.from_dict(each) for role, each in ours["method"].items()}
    same_ranks = (saved["P"], saved["K"]) == (job.P, job.K)
    if same_ranks and saved["rank"] != job.rank:
        alike = groups_are_alike or not any(state_dict["state"].values())
        _require_shared(saved["rank"], states, job, groups_are_alike=alike)
    return fitted(states, buckets, same_ranks=same_ranks, aloud=job.rank == 0)


def _require_shared(rank: int, states: Mapping[str, State], job: Job, *, groups_are_alike: bool) -> None:
    theirs = [f"{role} ({name})" for role, state in states.items() for name in state.not_shared()]
    if not groups_are_alike and rank // job.K != job.g:
        theirs.append("the optimizer of its group")
    if theirs:
        raise UserError(
            f"load_state_dict(): the state is that of rank {rank}, and rank {job.rank} has another one of "
            f"{', '.join(theirs)}: save optimizer.state_dict() on every rank, each in a file of its own, and "
            "load that"
        )
