"""By which library the tensors on devices travel, chosen for each communicator when groups are formed.

What comes from there by `split` and `apart` is staged again: two communicators of NCCL at once, each on a
lane of its own, may wait for each other for ever.
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
    """What a job file or a script asks for."""

    @property
    def intra_group(self) -> BackendName: ...
    @property
    def inter_group(self) -> BackendName: ...


@dataclass(frozen=True)
class DeviceBackends:
    """For the ranks of a group, and for those of one position across groups."""

    intra_group: BackendName = "auto"
    inter_group: BackendName = "auto"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> DeviceBackends:
        """Raises `UserError` for what is none of them."""
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
    """Whose tensors a rank sends, and what tells it from all others of the job; nothing where it has none."""

    device: torch.device | None = None
    identity: str = ""
    local_rank: int = 0


def place_on_node(world: Communicator) -> int:
    """This rank's number on its node: the launcher's, or counted where that says none; collective."""
    nodes = world.gather_objects(world.backend.node)
    counted = nodes[: world.rank].count(world.backend.node)
    told = launched(os.environ, world.size)
    return counted if told is None or told.local_rank is None else told.local_rank


def local_device(world: Communicator, wanted: str = "auto") -> Device:
    """Of its node's accelerators the one of this rank's number, but where "cpu" is wanted; collective."""
    place = place_on_node(world)
    device = of_place(place)
    if device is None or wanted == "cpu":
        return Device(local_rank=place)
    return Device(device, f"{world.backend.node} {identity(device)}", place)


def chosen(ranks: Communicator, wish: BackendName, own: Device, inside: bool) -> tuple[Communicator, str]:
    """The same ranks, whose tensors on devices travel as is wished for, and in words what was passed over and
    why. Collective.

    "auto" goes by what is there and proven: NCCL `inside` a group and on one node, GPU-aware MPI, by way of
    the host. Raises `UserError` where something else was named that is not to be had.
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


def share_thread(group: Communicator, cross: Communicator) -> Communicator:
    """`cross`, on the lane of `group` where both put work on the device by libraries of their own: begun in
    another order on each rank, these may wait for each other for ever."""
    return (
        cross
        if "mpi" in (group.device_backend, cross.device_backend)
        else cross.with_thread(group.comm_thread)
    )


def _without(ranks: Communicator, wish: BackendName, identities: Sequence[str]) -> tuple[Communicator, str]:
    """Where not everybody has an accelerator."""
    lacking = [rank for rank, identity in enumerate(identities) if not identity]
    why = f"rank {lacking[0]} of {ranks.size} has no accelerator for torch {torch.__version__}"
    if wish != "auto":
        raise UserError(why)
    return ranks, why if len(lacking) < ranks.size else ""


def _attempted(
    ranks: Communicator, way: str, device: torch.device, identities: Sequence[str]
) -> Communicator | str:
    """By this way, or why not; the same on every rank."""
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
    """What the first rank says that says something."""
    answers: list[str] = ranks.gather_objects(why)
    return next(filter(None, answers), "")
