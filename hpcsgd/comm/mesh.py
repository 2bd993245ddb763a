"""All ranks as a P × K mesh of torch.distributed, for torch's own features such as `fully_shard`.

torch requires a default group. If there is none, hpcsgd makes one with its own store, without environment
variables, and destroys it when the process ends. A user's default group is used if it has the same ranks.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hpcsgd.comm.backend import Backend
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.process_group import (
    LIBRARIES,
    distributed,
    meeting_point,
    missing,
    require_address_of_gloo,
)
from hpcsgd.comm.shutdown import close_at_the_end
from hpcsgd.comm.streams import current, identity, none_here
from hpcsgd.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAMES = ("replicate", "shard")
_made: WeakKeyDictionary[Backend, dict[tuple[int, int, str], DeviceMesh]] = WeakKeyDictionary()


def made(world: Communicator, P: int, K: int, kind: str) -> DeviceMesh | None:
    """Return the mesh made before; None if there is none, or torch's groups have been destroyed since."""
    return _made.get(world.backend, {}).get((P, K, kind)) if distributed().is_initialized() else None


def require_possible(world: Communicator, kind: str) -> None:
    """Raise `UserError`, on some ranks or all, if no mesh is possible; collective."""
    dist = distributed()
    here = dist.is_initialized()
    own = (here, (world.backend.node, os.getpid()), socket.gethostname(), _accelerator_of(world, kind))
    initialized, processes, hosts, accelerators = zip(*world.gather_objects(own), strict=True)
    if kind not in LIBRARIES:
        raise UserError(f"mesh of {kind!r} devices: allowed are {', '.join(map(repr, LIBRARIES))}")
    if why := missing(LIBRARIES[kind]):
        raise UserError(f"mesh of {kind!r} devices: {why}")
    if kind != "cpu" and "" in accelerators:
        rank = accelerators.index("")
        reason = none_here(kind) if not own[3] else f"torch sees none on rank {rank}"
        raise UserError(f"mesh of {kind!r} devices: {reason}")
    shared = next((each for each in accelerators if each and accelerators.count(each) > 1), None)
    if shared is not None:
        first, second = [rank for rank, each in enumerate(accelerators) if each == shared][:2]
        raise UserError(
            f"mesh of {kind!r} devices: ranks {first} and {second} share a GPU, and "
            f"{LIBRARIES[kind].upper()} wants one for each rank"
        )
    if len(set(hosts)) > 1 and not here:
        require_address_of_gloo()
    if len(set(processes)) < world.size:
        raise UserError("ranks are threads here, and torch.distributed has one default group in a process")
    if len(set(initialized)) > 1:
        raise UserError(
            f"torch.distributed has a default group on {sum(initialized)} of {world.size} ranks: all or none"
        )
    if here and (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise UserError(
            f"torch.distributed has a default group in which this is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}; for hpcsgd it is rank {world.rank} of {world.size}: let hpcsgd make it"
        )


def _accelerator_of(world: Communicator, kind: str) -> str:
    """Return text that identifies this rank's device in the job; "" for the host or without a device."""
    device = current(kind)
    return "" if device is None else f"{world.backend.node} {identity(device)}"


def make(world: Communicator, P: int, K: int, kind: str) -> DeviceMesh:
    """Return the mesh with rank g·K + j at (g, j), for tensors on this kind of device; collective."""
    if not distributed().is_initialized():
        _make_default_group(world, kind)
    mesh = _made.setdefault(world.backend, {})[P, K, kind] = _formed(world, P, K, kind)
    return mesh


def _make_default_group(world: Communicator, kind: str) -> None:
    distributed().init_process_group(
        _libraries(kind),
        store=meeting_point(world.backend, world.timeout),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout),
    )
    _defaults.append(_Default())
    close_at_the_end(_defaults[-1])


def _formed(world: Communicator, P: int, K: int, kind: str) -> DeviceMesh:
    """Return the mesh. Its groups use the world's timeout, not the half hour of `init_device_mesh`."""
    from torch.distributed.device_mesh import DeviceMesh

    of_groups = [[g * K + j for j in range(K)] for g in range(P)]
    of_positions = [[g * K + j for g in range(P)] for j in range(K)]
    limit = timedelta(seconds=world.timeout)
    groups = [
        distributed().new_subgroups_by_enumeration(ranks, limit, _libraries(kind))[0]
        for ranks in (of_positions, of_groups)
    ]
    return DeviceMesh.from_group(groups, kind, torch.tensor(of_groups, device="cpu"), mesh_dim_names=NAMES)


def _libraries(kind: str) -> str:
    """Return the backend string for torch, which warns if a single backend is named with its device."""
    library = LIBRARIES[kind]
    return library if kind == "cpu" else f"cpu:{LIBRARIES['cpu']},{kind}:{library}"


class _Default:
    """The default group that hpcsgd made, with all groups made from it."""

    def __init__(self) -> None:
        self._group: Any = distributed().group.WORLD

    def close(self) -> None:
        dist = distributed()
        if dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()


_defaults: list[_Default] = []
