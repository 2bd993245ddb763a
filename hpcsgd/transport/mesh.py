"""All ranks as a mesh of torch.distributed, P × K: for what torch itself does in a group or across groups,
as `fully_shard`.

torch asks for a default group. Where there is none, one is made, without environment variables and of our own
store, and is ended with this process; that of a user serves where it has the same ranks.
"""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from hpcsgd.errors import UserError
from hpcsgd.transport.base import Transport
from hpcsgd.transport.process_group import LIBRARIES, distributed, meeting_point, missing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAMES = ("cross", "group")
_made: WeakKeyDictionary[Transport, dict[str, DeviceMesh]] = WeakKeyDictionary()


def mesh(world: Transport, P: int, K: int, kind: str) -> DeviceMesh:
    """Rank g·K + j at (g, j), for tensors on this kind of device; collective, the first time."""
    meshes = _made.setdefault(world, {})
    if kind not in meshes:
        _require_library(kind)
        _require_default_group(world, kind)
        meshes[kind] = _formed(world, P, K, kind)
    return meshes[kind]


def _require_library(kind: str) -> None:
    if kind not in LIBRARIES:
        raise UserError(f"mesh of {kind!r} devices: allowed are {', '.join(map(repr, LIBRARIES))}")
    if why := missing(LIBRARIES[kind]):
        raise UserError(f"mesh of {kind!r} devices: {why}")


def _require_default_group(world: Transport, kind: str) -> None:
    dist = distributed()
    if not dist.is_initialized():
        dist.init_process_group(
            _libraries(kind),
            store=meeting_point(world.backend, world.timeout),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.timeout),
        )
        atexit.register(_close)  # before torch takes things apart, which it does after whoever came later
    elif (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise UserError(
            f"torch.distributed has a default group in which this is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}; for hpcsgd it is rank {world.rank} of {world.size}: let hpcsgd make it"
        )


def _formed(world: Transport, P: int, K: int, kind: str) -> DeviceMesh:
    """torch's own `init_device_mesh` would let its groups wait for half an hour."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks, limit = torch.arange(P * K).view(P, K), timedelta(seconds=world.timeout)
    groups = [
        distributed().new_subgroups_by_enumeration(rows.tolist(), limit, _libraries(kind))[0]
        for rows in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=NAMES)


def _libraries(kind: str) -> str:
    """As torch wants it, which warns of a single one that is told with its kind."""
    library = LIBRARIES[kind]
    return library if kind == "cpu" else f"cpu:{LIBRARIES['cpu']},{kind}:{library}"


def _close() -> None:
    """torch's default group, which we made, and the others with it."""
    if distributed().is_initialized():
        distributed().destroy_process_group()
