"""Where ranks that MPI does not join can meet: what variables, Slurm or a default process group say of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hpcsgd.errors import JobError
from hpcsgd.launcher import ADDRESS, PORT, TORCH_RANK, TORCH_SIZE, Launched, launched

_PORTS = range(10000, 30000)
"""Of which a step of Slurm takes one: below those that Linux deals out."""


class NoWorld(JobError):
    """The ranks do not come together. There is nobody yet who could tell the others."""


@dataclass(frozen=True)
class Place:
    """Which rank this is, and where all meet; nowhere where it is the only one."""

    rank: int = 0
    size: int = 1
    url: str = ""
    """As torch.distributed knows it; empty: the default group's store."""


def default_group() -> Place | None:
    """That of torch.distributed which the script has, if it is one of several ranks."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Place(dist.get_rank(), dist.get_world_size())


def in_environment(environ: Mapping[str, str]) -> Place | str:
    """As the variables of torch.distributed and of launchers say; or what is wrong with them."""
    told = launched(environ)
    rank, size = _numbers(environ, told)
    if told is not None and told.launcher.name == "srun" and size is not None:
        environ = {**_by_slurm(environ), **environ}
    given = {ADDRESS: environ.get(ADDRESS), PORT: environ.get(PORT), TORCH_RANK: rank, TORCH_SIZE: size}
    if missing := [name for name, value in given.items() if value in ("", None)]:
        return f"there is no {' and no '.join(missing)}"
    address, port = str(given[ADDRESS]), str(given[PORT])
    if rank is None or size is None or not (rank < size and port.isdigit() and 0 < int(port) < 1 << 16):
        values = ", ".join(f"{name} = {value}" for name, value in given.items())
        return f"{values}: expected a port, and a rank below the size of the world"
    return Place(rank, size, f"tcp://{f'[{address}]' if ':' in address else address}:{port}")


def _numbers(environ: Mapping[str, str], told: Launched | None) -> tuple[int | None, int | None]:
    """Rank and size. torch's own variables come first: whoever sets them means them."""
    own = [environ.get(name, "") for name in (TORCH_RANK, TORCH_SIZE)]
    if all(value.isdigit() for value in own):
        return int(own[0]), int(own[1])
    return (None, None) if told is None or told.size is None else (told.rank, told.size)


def _by_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The first node of a step, and a port that other steps there do not have."""
    number = 77 * int(environ.get("SLURM_JOB_ID", 0)) + int(environ.get("SLURM_STEP_ID", 0))
    found = {PORT: str(_PORTS[number % len(_PORTS)])}
    if nodes := environ.get("SLURM_STEP_NODELIST"):
        found[ADDRESS] = first_host(nodes)
    return found


def first_host(nodes: str) -> str:
    """Of a list as Slurm writes it.

    >>> first_host("node[03-05,7],login")
    'node03'
    """
    return re.sub(r"\[([^],-]+)[^]]*]", r"\1", nodes).partition(",")[0]
