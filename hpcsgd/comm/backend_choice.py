"""Choose the backend for tensors on devices, for each communicator, when the groups are formed.

Communicators made by `split` and `dup_with_thread` stage device tensors in host memory again. Two NCCL
communicators in use at once, each with its own communication thread, can deadlock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch

from hpcsgd.comm import process_group, proof
from hpcsgd.comm.backend import Backend, PeerLost, first_line
from hpcsgd.comm.by_device import ByDevice
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.gpu_mpi import GpuAware, TakesAddresses
from hpcsgd.comm.process_group import LIBRARIES, GroupBackend
from hpcsgd.comm.streams import identity, of_place
from hpcsgd.errors import UserError, near_miss
from hpcsgd.launcher import launched

BackendName = Literal["auto", "mpi", "nccl", "gpu_mpi"]
BACKEND_NAMES: tuple[BackendName, ...] = ("auto", "mpi", "nccl", "gpu_mpi")


class GivenBackends(Protocol):
    """The backends that a job file or a script names."""

    @property
    def intra_group(self) -> BackendName: ...
    @property
    def inter_group(self) -> BackendName: ...


@dataclass(frozen=True)
class DeviceBackends:
    """The backends for the ranks of a group, and for the ranks with one shard index across groups."""

    intra_group: BackendName = "auto"
    inter_group: BackendName = "auto"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> DeviceBackends:
        """Return the backends in `given`. Raises `UserError` for an unknown key or backend."""
        known = {field.name for field in fields(cls)}
        for key, value in given.items():
            if key not in known:
                raise UserError(f"device_backend has no {key!r}: {near_miss(key, known)}")
            if value not in BACKEND_NAMES:
                raise UserError(f"device_backend {key} = {value!r}: {near_miss(value, BACKEND_NAMES)}")
        return cls(**given)  # pyright: ignore[reportArgumentType]


AUTO = DeviceBackends()


@dataclass(frozen=True)
class Device:
    """The device of a rank, and text that identifies it in the job; None and "" without a device."""

    device: torch.device | None = None
    identity: str = ""
    local_rank: int = 0


def place_on_node(world: Communicator) -> int:
    """Return this rank's number on its node, from the launcher if it gives one, or counted. Collective."""
    nodes = world.gather_objects(world.backend.node)
    counted = nodes[: world.rank].count(world.backend.node)
    reported = launched(os.environ, world.size)
    return counted if reported is None or reported.local_rank is None else reported.local_rank


def local_device(world: Communicator, wanted: str = "auto") -> Device:
    """Return the accelerator whose number is this rank's number on its node; collective.

    The result has no device if "cpu" is `wanted`, or if there is no accelerator.
    """
    place = place_on_node(world)
    device = of_place(place)
    if device is None or wanted == "cpu":
        return Device(local_rank=place)
    return Device(device, f"{world.backend.node} {identity(device)}", place)


def chosen(ranks: Communicator, wish: BackendName, own: Device, inside: bool) -> tuple[Communicator, str]:
    """Return `ranks` with the backend `wish` for device tensors, and why other backends were not used.

    Collective. "auto" uses the first backend that exists and passes a test. It tries NCCL if the ranks are
    `inside` a group or on one node, then GPU-aware MPI, then staging in host memory. Raises `UserError` if a
    backend that was named by the user is not available.
    """
    if ranks.size == 1 or wish == "mpi":
        return ranks, ""
    identities, nodes = zip(*ranks.gather_objects((own.identity, ranks.backend.node)), strict=True)
    if own.device is None or not all(identities):
        return _without(ranks, wish, identities)
    on_one_node = len(set(nodes)) == 1
    ways = [wish] if wish != "auto" else ["nccl", "gpu_mpi"] if inside or on_one_node else ["gpu_mpi"]
    passed_over: list[str] = []
    for way in ways:
        made = _attempted(ranks, way, own.device, identities)
        if not isinstance(made, str):
            return made, "; ".join(passed_over)
        if wish != "auto":
            raise UserError(made)
        passed_over.append(f"{way}: {made}")
    return ranks, "; ".join(passed_over)


def share_thread(intra_group: Communicator, inter_group: Communicator) -> Communicator:
    """Return `inter_group`, on the thread of `intra_group` if neither stages device tensors in host memory.

    Two device libraries can deadlock if their operations do not begin in the same order on all ranks.
    """
    return (
        inter_group
        if "mpi" in (intra_group.device_backend, inter_group.device_backend)
        else inter_group.with_thread(intra_group.comm_thread)
    )


def _without(ranks: Communicator, wish: BackendName, identities: Sequence[str]) -> tuple[Communicator, str]:
    """Return `ranks` unchanged, and the reason: one of the ranks has no accelerator.

    Unchanged, they stage device tensors in host memory. If no rank has an accelerator, the reason is empty.
    Raises `UserError` if the user named another backend.
    """
    lacking = [rank for rank, identity in enumerate(identities) if not identity]
    why = f"rank {lacking[0]} of {ranks.size} has no accelerator for torch {torch.__version__}"
    if wish != "auto":
        raise UserError(why)
    return ranks, why if len(lacking) < ranks.size else ""


def _attempted(
    ranks: Communicator, way: str, device: torch.device, identities: Sequence[str]
) -> Communicator | str:
    """Return a communicator with backend `way`, or why there is none; the same on every rank."""
    host = ranks.backend.host
    missing, make = (_no_nccl, _nccl) if way == "nccl" else (_no_gpu_mpi, _gpu_mpi)
    if why := _first(ranks, missing(host, device, identities)):
        return why

    def attempt() -> Backend | str:
        try:
            made = make(host, device, ranks.timeout)
            return proof.fault(made, device) or made
        except PeerLost:
            raise
        except RuntimeError as error:
            return first_line(error)

    made: Backend | str = ranks.run(attempt, f"trying {way}", torch.empty(0, device=device)).wait()
    why = _first(ranks, made if isinstance(made, str) else "")
    if isinstance(made, str) or why:
        return why
    return ranks.with_backend(ByDevice(host, lambda _: made), made.name)


def _no_nccl(host: Backend, device: torch.device, identities: Sequence[str]) -> str:
    if len(set(identities)) < len(identities):
        return "ranks share a GPU"
    library = LIBRARIES.get(device.type)
    return process_group.missing(library) if library else f"none for devices of kind {device.type}"


def _nccl(host: Backend, device: torch.device, timeout: float) -> Backend:
    return GroupBackend(host, LIBRARIES[device.type], timeout)


def _no_gpu_mpi(host: Backend, device: torch.device, identities: Sequence[str]) -> str:
    return host.lacks(device) if isinstance(host, TakesAddresses) else f"{host.name} takes no addresses"


def _gpu_mpi(host: Backend, device: torch.device, timeout: float) -> Backend:
    return GpuAware(host)


def _first(ranks: Communicator, why: str) -> str:
    """Return the first reason `why` in rank order that is not empty; "" if all are empty. Collective."""
    answers: list[str] = ranks.gather_objects(why)
    return next(filter(None, answers), "")
