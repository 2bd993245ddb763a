"""Check the accelerators: their drivers, the links between them, and the speed of each backend."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import torch

from hpcsgd.cluster.doctor.exercise import LARGE_ROUNDS, bandwidth, finish, median_seconds, slowest
from hpcsgd.cluster.doctor.finding import Finding, ok, warning
from hpcsgd.comm import Communicator
from hpcsgd.comm.backend_choice import BackendName, Device, chosen, local_device
from hpcsgd.comm.streams import DRIVERS, all_visible, on_accelerator, reaches, why_none
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError, count_text

BACKENDS: tuple[BackendName, ...] = ("mpi", "nccl", "gpu_mpi")
SIZE = 64 << 20  # bytes that one measurement copies or sends


def look_at_accelerators(topology: Topology) -> list[Finding]:
    """Return the findings about accelerators, the same on every rank; collective."""
    own = local_device(topology.world)
    having = topology.world.gather_objects(own.device is not None)
    if own.device is None or not all(having):
        return [_without(having)]
    found = [driver(topology.world, DRIVERS), links(topology.world), copies(topology.world, own.device)]
    if topology.world_size > 1:
        found += [travel(topology.world, way, own) for way in BACKENDS]
        inside, across = topology.intra_group.device_backend, topology.inter_group.device_backend
        found.append(ok(f"transport: {inside} in groups, {across} across them"))
    return found


def driver(world: Communicator, files: Sequence[Path]) -> Finding:
    """Return a finding about the driver version in `files`, a warning if it differs between nodes."""
    reported = sorted(set(world.gather_objects(driver_version(files))))
    if len(reported) > 1:
        return warning(f"driver: {' and '.join(reported)}: the nodes differ")
    return ok(f"driver: {reported[0]}")


def links(world: Communicator) -> Finding:
    """Return a finding about which accelerators of rank 0's node read each other's memory directly."""
    return world.gather_objects(_links(all_visible()) if world.rank == 0 else None)[0]


def copies(world: Communicator, device: torch.device) -> Finding:
    """Return a finding about the speed of copies between pinned host memory and the device (staging)."""
    there = torch.zeros(SIZE // 4, device=device)
    here = torch.zeros(SIZE // 4, device="cpu", pin_memory=on_accelerator(device))

    def copy(to: torch.Tensor, source: torch.Tensor) -> float:
        def once() -> None:
            to.copy_(source, non_blocking=True)
            finish(device)

        return SIZE / slowest(world, median_seconds(once, LARGE_ROUNDS)) / 1e9

    return ok(
        f"copies: {copy(here, there):.1f} GB/s down, {copy(there, here):.1f} GB/s up, on the slowest rank"
    )


def travel(world: Communicator, way: BackendName, own: Device) -> Finding:
    """Return a finding about how fast the backend `way` sends device tensors, or why it cannot be used."""
    try:
        ranks, _ = chosen(world, way, own, inside=True)
    except UserError as error:
        return ok(f"transport: not by {way}: {error}")
    return bandwidth(ranks, f"from device to device by {ranks.device_backend}", own.device, SIZE)


def _without(having: Sequence[bool]) -> Finding:
    if any(having):
        return warning(
            f"GPUs: {having.count(False)} of {count_text(len(having), 'rank')} have none that torch can use"
        )
    reported = f"GPUs: none that torch {torch.__version__} can use"
    # without a driver the node has no GPU, so the reason does not matter
    driver = any(path.exists() for path in DRIVERS)
    return warning(f"{reported}: {why}") if driver and (why := why_none("cuda")) else ok(reported)


def driver_version(files: Sequence[Path]) -> str:
    """Return the driver version that the kernel shows in one of `files`, or "unknown"."""
    for path in files:
        if path.is_file() and (found := re.search(r"\d+\.\d+(\.\d+)*", path.read_text())):
            return found[0]
    return "unknown"


def _links(devices: Sequence[torch.device]) -> Finding:
    if len(devices) < 2:
        return ok("links: a rank sees one GPU alone, so nothing is known of what is between them")
    pairs = {(a.index, b.index): reaches(a, b) for a, b in combinations(devices, 2)}
    if None in pairs.values():
        return ok(f"links: torch does not tell what is between devices of kind {devices[0].type}")
    apart = [f"{a}-{b}" for (a, b), direct in pairs.items() if not direct]
    if apart:
        return warning(f"links: by way of the host between GPUs {', '.join(apart)} of a node")
    return ok(f"links: the {len(devices)} GPUs of a node reach each other directly")
