"""The information that `hpcsgd doctor` collects about each rank, and a table of all ranks."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import h5py  # pyright: ignore[reportMissingTypeStubs]
import torch

from hpcsgd.cluster.doctor.finding import numbers
from hpcsgd.comm.streams import identity, of_place, properties
from hpcsgd.core.topology import Topology

PACKAGES = ("hpcsgd", "torch", "h5py", "mpi4py", "numpy")
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@dataclass(frozen=True)
class RankInfo:
    """Information about one rank: its node, cores, threads, GPU and software."""

    rank: int
    node: int
    """Ranks with equal `node` share memory."""
    host: str
    group: int
    position: int
    cpus: tuple[int, ...]
    """The CPUs that this rank may use."""
    autogroup: bool
    """True if Linux divides the cores of the node among sessions, of which mpiexec makes one per rank."""
    threads: int
    gpu: str
    gpu_id: str
    """An identifier of the GPU, the same for ranks that share the GPU; empty without a GPU."""
    backend: str
    """The library by which the ranks are connected, such as MPICH or gloo, and its version."""
    thread_level: str
    versions: str


def examine(topology: Topology, thread_level: str) -> RankInfo:
    """Return the information about this rank of `topology`; collective."""
    nodes = topology.world.gather_objects(topology.world.backend.node)
    gpu, gpu_id = _gpu(nodes[: topology.rank].count(nodes[topology.rank]))
    return RankInfo(
        rank=topology.rank,
        node=topology.world.backend.node,
        host=_host(),
        group=topology.group_index,
        position=topology.shard_index,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        autogroup=_autogroup(),
        threads=torch.get_num_threads(),
        gpu=gpu,
        gpu_id=gpu_id,
        backend=topology.world.backend.name.split(",")[0],
        thread_level=thread_level,
        versions=_versions(),
    )


def _host() -> str:
    """Return the node's name; Slurm's name comes first, because virtual nodes share a host name."""
    name, slurm = platform.node(), os.environ.get("SLURMD_NODENAME", "")
    return name if slurm in ("", name) else f"{slurm} on {name}"


def _autogroup() -> bool:
    try:
        return AUTOGROUP.read_text().strip() == "1"
    except OSError:  # a kernel without it
        return False


def _gpu(local_rank: int) -> tuple[str, str]:
    """Return the name and an identifier of the GPU that this rank uses."""
    device = of_place(local_rank)
    if device is None:
        return "none", ""
    found = properties(device)
    name = f"{found.name}, {found.total_memory / 1e9:.0f} GB" if found is not None else device.type
    return f"{device.index}: {name}", identity(device)


def _versions() -> str:
    packages = [f"{name} {_version(name)}" for name in PACKAGES]
    return ", ".join([f"Python {platform.python_version()}", *packages, f"HDF5 {h5py.version.hdf5_version}"])  # pyright: ignore[reportUnknownMemberType]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def table(ranks: Sequence[RankInfo], grouped: bool) -> str:
    """Return a table with a line per rank. If `grouped`, it also shows each rank's group and shard index."""
    titles = ["rank", "node", *(["group", "position"] if grouped else [])]
    titles += ["CPUs", "threads", "GPU", "backend", "thread level"]
    rows = [titles, *(_row(rank, grouped) for rank in ranks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _row(rank: RankInfo, grouped: bool) -> list[str]:
    place = [str(rank.group), str(rank.position)] if grouped else []
    cpus = numbers(list(rank.cpus))
    return [str(rank.rank), rank.host, *place, cpus, str(rank.threads), rank.gpu, rank.backend,
            rank.thread_level]  # fmt: skip


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join(cells).rstrip()
