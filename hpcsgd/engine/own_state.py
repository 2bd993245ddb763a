"""A check that a `state_dict()` is this rank's: with many methods each rank has a state of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import fitted
from hpcsgd.core.state import State
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError


def place(topology: Topology) -> dict[str, int]:
    """Return P, K and this rank's number, by which a saved state is recognized as this rank's."""
    return {"P": topology.num_groups, "K": topology.group_size, "rank": topology.rank}


def loadable(
    state_dict: Mapping[str, Any], topology: Topology, buckets: Sequence[Bucket], *, groups_are_alike: bool
) -> dict[str, State]:
    """Return the method's state for this rank from a `state_dict` of a DistributedOptimizer.

    The optimizer's state is the same on all ranks of a group, and of all groups if `groups_are_alike`.

    Raises:
        UserError: If another rank saved it with the same P × K, and ranks have states of their own.
    """
    ours = state_dict["hpcsgd"]
    if "place" not in ours:
        raise UserError("this state_dict is of an older version of hpcsgd")
    saved, states = ours["place"], {role: State.from_dict(each) for role, each in ours["method"].items()}
    same_ranks = (saved["P"], saved["K"]) == (topology.num_groups, topology.group_size)
    if same_ranks and saved["rank"] != topology.rank:
        alike = groups_are_alike or not any(state_dict["state"].values())
        _require_shared(saved["rank"], states, topology, groups_are_alike=alike)
    return fitted(states, buckets, same_ranks=same_ranks, aloud=topology.rank == 0)


def _require_shared(
    rank: int, states: Mapping[str, State], topology: Topology, *, groups_are_alike: bool
) -> None:
    theirs = [f"{role} ({name})" for role, state in states.items() for name in state.not_shared()]
    if not groups_are_alike and rank // topology.group_size != topology.group_index:
        theirs.append("the optimizer of its group")
    if theirs:
        raise UserError(
            f"load_state_dict(): the state is that of rank {rank}, and rank {topology.rank} has another one "
            f"of {', '.join(theirs)}: call optimizer.consolidate_state_dict() on all ranks before that rank "
            "saves optimizer.state_dict(), or save it on every rank, each in a file of its own"
        )
