"""Where ranks without MPI can connect, from environment variables, Slurm or a default process group."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hpcsgd.errors import JobError
from hpcsgd.launcher import ADDRESS, PORT, TORCH_RANK, TORCH_SIZE, Launched, all_reported, launched

_PORTS = range(10000, 30000)
"""The ports from which a Slurm step takes one; they lie below those that Linux assigns."""


class NoWorld(JobError):
    """The ranks cannot connect. So each rank raises this error, and none can report it for the others."""


@dataclass(frozen=True)
class Place:
    """The rank of this process, the number of ranks, and the address where all ranks connect."""

    rank: int = 0
    size: int = 1
    url: str = ""
    """The address in torch.distributed's form; empty for a single rank, and for the default group's store."""


def default_group() -> Place | None:
    """Return the place of the script's default group in torch.distributed, if it has several ranks."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Place(dist.get_rank(), dist.get_world_size())


def in_environment(environ: Mapping[str, str]) -> Place | str:
    """Return the place given by variables of torch.distributed and launchers, or what is wrong with them."""
    rank, size = _numbers(environ, launched(environ))
    # `srun --mpi=pmi2` reports the same numbers as a launcher with PMI, and in Slurm's variables
    same = (each for each in all_reported(environ) if (each.rank, each.size) == (rank, size))
    if any(each.launcher.name == "srun" for each in same):
        environ = {**_by_slurm(environ), **environ}
    given = {ADDRESS: environ.get(ADDRESS), PORT: environ.get(PORT), TORCH_RANK: rank, TORCH_SIZE: size}
    if missing := [name for name, value in given.items() if value in ("", None)]:
        return f"there is no {' and no '.join(missing)}"
    address, port = str(given[ADDRESS]), str(given[PORT])
    if rank is None or size is None or not (rank < size and port.isdigit() and 0 < int(port) < 1 << 16):
        values = ", ".join(f"{name} = {value}" for name, value in given.items())
        return f"{values}: expected a port, and a rank below the size of the world"
    return Place(rank, size, f"tcp://{f'[{address}]' if ':' in address else address}:{port}")


def _numbers(environ: Mapping[str, str], reported: Launched | None) -> tuple[int | None, int | None]:
    """Return rank and size. torch's own variables count first, because they were set on purpose."""
    own = [environ.get(name, "") for name in (TORCH_RANK, TORCH_SIZE)]
    if all(value.isdigit() for value in own):
        return int(own[0]), int(own[1])
    return (None, None) if reported is None or reported.size is None else (reported.rank, reported.size)


def _by_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the first node of a Slurm step, and a port that other steps there do not use."""
    number = 77 * int(environ.get("SLURM_JOB_ID", 0)) + int(environ.get("SLURM_STEP_ID", 0))
    found = {PORT: str(_PORTS[number % len(_PORTS)])}
    if nodes := environ.get("SLURM_STEP_NODELIST"):
        found[ADDRESS] = first_host(nodes)
    return found


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation.

    >>> first_host("node[03-05,7],login")
    'node03'
    """
    return re.sub(r"\[([^],-]+)[^]]*]", r"\1", nodes).partition(",")[0]
