"""The state of all ranks, gathered on one of them, which saves it for all.

Groups have optimizer states of their own, and ranks have states of the method of their own. A complete state
is a `state_dict()` of one rank with those of all others in its entry "ranks". Each rank finds its own in it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, phase
from hpcsgd.comm.on_host import taken
from hpcsgd.comm.streams import HOST
from hpcsgd.core.state import State
from hpcsgd.core.topology import Topology
from hpcsgd.engine.inside import shared_state
from hpcsgd.engine.own_state import place
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.engine.state_of_parts import Place
from hpcsgd.errors import UserError, in_one_line

Options = list[dict[str, Any]]
"""The options of all parameter groups."""
RANKS = "ranks"


@dataclass(frozen=True)
class CompleteState:
    """The result of `gathered` on one rank: the complete state on rank `on`, and nothing on the others."""

    on: int
    state: dict[str, Any] | None

    def state_dict(self, options: Options) -> dict[str, Any]:
        """Return the complete state, with the current `options` of the parameter groups."""
        if self.state is None:
            raise UserError(
                f"state_dict() on a rank without the state: consolidate_state_dict() has gathered it on rank "
                f"{self.on}; call state_dict() there alone, or make no consolidate_state_dict() and call "
                "state_dict() on all ranks"
            )
        return {**self.state, "param_groups": options}


def gathered(
    local: ShardedOptimizer,
    method: Mapping[str, State],
    topology: Topology,
    t: int,
    to: int,
    *,
    groups_are_alike: bool,
) -> CompleteState:
    """Gather the state of all ranks on rank `to`; collective. `t` is the number of updates so far.

    `groups_are_alike`: the groups have the same optimizer state, so that one of them sends it.
    """
    own_group = to // topology.group_size
    needed = local.cut or topology.shard_index == 0
    sends = needed and (not groups_are_alike or topology.group_index == own_group)
    mine = {
        "parts": [(astuple(place), values) for place, values in local.parts()] if sends else [],
        "shared": shared_state(local.optimizer),
        "options": local.options(),
        "method": {role: each.to_dict() for role, each in method.items()},
    }
    everyone = _sent(taken(mine), topology.world, to)
    if everyone is None:
        return CompleteState(to, None)
    K = topology.group_size
    states: dict[int, dict[Any, Any]] = {}
    for g in range(topology.num_groups) if not groups_are_alike else [own_group]:
        ranks = everyone[g * K : (g + 1) * K]
        parts = ([(Place(*place), values) for place, values in each["parts"]] for each in ranks)
        states[g] = local.joined(parts) | ranks[0]["shared"]
    ours = {
        "t": t,
        "place": place(topology),
        "method": everyone[to]["method"],
        RANKS: {
            "states": {g: state for g, state in states.items() if g != own_group},
            "options": {g: _differing(everyone[g * K]["options"], everyone[to]["options"]) for g in states},
            "methods": {r: _own(each["method"]) for r, each in enumerate(everyone) if r != to},
        },
    }
    return CompleteState(to, {"state": states[own_group], "hpcsgd": ours})


def of_rank(state_dict: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Return what this rank's `state_dict()` was, if `state_dict` is complete and of as many ranks.

    Otherwise return it without the states of other ranks.
    """
    ours = dict(state_dict["hpcsgd"])
    if (ranks := ours.pop(RANKS, None)) is None:
        return state_dict
    found = {**state_dict, "hpcsgd": ours}
    here = place(topology)
    if {**ours["place"], "rank": topology.rank} != here or ours["place"] == here:
        return found
    g, method = topology.group_index, ranks["methods"][topology.rank]
    ours["place"] = here
    ours["method"] = {
        role: {**{k: v for k, v in theirs.items() if k == "replicated"}, **method[role]}
        for role, theirs in ours["method"].items()
    }
    options = ranks["options"].get(g, [{}] * len(state_dict["param_groups"]))
    return {
        "state": ranks["states"].get(g, state_dict["state"]),
        "param_groups": [{**o, **own} for o, own in zip(state_dict["param_groups"], options, strict=True)],
        "hpcsgd": ours,
    }


def _sent(mine: Any, world: Communicator, to: int) -> list[Any] | None:
    """Return the `mine` of all ranks on rank `to`, in rank order, and None elsewhere; collective.

    One rank after the other sends, so that only one message at a time needs memory on rank `to`.
    """
    packed = b"" if world.rank == to else _packed(mine)
    sizes = world.gather_objects(len(packed))
    found: list[Any] = []
    for rank, size in enumerate(sizes):
        if rank == to:
            found.append(mine)
        elif world.rank == to:
            received = torch.empty(size, dtype=torch.uint8, device=HOST)
            with phase("state"):
                world.sendrecv({}, {rank: received}).wait()
            found.append(_unpacked(received, rank))
        elif world.rank == rank:
            with phase("state"):
                world.sendrecv({to: torch.frombuffer(bytearray(packed), dtype=torch.uint8)}, {}).wait()
    return found if world.rank == to else None


def _packed(mine: Any) -> bytes:
    file = io.BytesIO()
    torch.save(mine, file)
    return file.getvalue()


def _unpacked(received: Tensor, rank: int) -> Any:
    """Return the state that `rank` sent. It has only values that `torch.load(weights_only=True)` accepts."""
    try:
        return torch.load(io.BytesIO(received.numpy().data), weights_only=True)
    except Exception as error:
        raise UserError(
            f"consolidate_state_dict(): the state of rank {rank} has values that are not tensors, numbers or "
            f"strings: save by hpcsgd.save, or save state_dict() on every rank ({in_one_line(error)[:200]})"
        ) from error


def _differing(options: Options, common: Options) -> Options:
    """Return those options of a group's ranks that are not in `common`, such as numbers of Prodigy."""
    return [
        {key: value for key, value in group.items() if key not in other or not _same(value, other[key])}
        for group, other in zip(options, common, strict=True)
    ]


def _same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def _own(method: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the state of a method without what is the same on all ranks."""
    return {role: {k: v for k, v in each.items() if k != "replicated"} for role, each in method.items()}
