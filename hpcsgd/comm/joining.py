"""Connect all ranks of this job, by MPI or without it."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hpcsgd.comm.backend import first_line
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.place import NoWorld, Place, default_group, in_environment
from hpcsgd.errors import UserError, near_miss
from hpcsgd.launcher import ADDRESS, PORT, TORCH_RANK, TORCH_SIZE, Launched, all_reported, launched

RequestedBackend = Literal["auto", "mpi", "gloo"]
REQUESTED_BACKEND: tuple[RequestedBackend, ...] = ("auto", "mpi", "gloo")
REMEDY = "start with torchrun, which needs none, or install one by `pip install hpcsgd[mpich]`"
RENDEZVOUS = f"start with torchrun, or set {ADDRESS}, {PORT}, {TORCH_RANK} and {TORCH_SIZE}"


@dataclass(frozen=True)
class Choice:
    """The chosen backend, and why; without MPI, `place` is where the ranks connect."""

    backend: Literal["mpi", "gloo"]
    why: str
    place: Place | None = None


def world(timeout: float = 600.0, backend: str = "auto") -> Communicator:
    """Return a communicator of all ranks that were started; from now on they end together.

    Raises:
        UserError: If the backend is unknown.
        NoWorld: If the ranks cannot connect.
    """
    choice = reported_once(lambda: chosen(backend, os.environ, _no_mpi))
    if choice.place is None:
        from hpcsgd.comm import mpi  # MPI starts when it is imported

        made = mpi.world(timeout)
    else:
        from hpcsgd.comm import gloo_world

        made = gloo_world.world(choice.place, timeout)
    made.chosen = f"{choice.backend}: {choice.why}"
    return made


def reported_once(choose: Callable[[], Choice]) -> Choice:
    """Return the result of `choose`; if it raises, let one rank report the error.

    All ranks that a launcher has started raise the same error before they are connected. One of them
    reports it; the others leave a moment later.
    """
    try:
        return choose()
    except UserError:
        by = launched(os.environ)
        if by is not None and not by.speaks:
            time.sleep(1.0)
            os._exit(1)
        raise


def chosen(backend: str, environ: Mapping[str, str], no_mpi: Callable[[], str]) -> Choice:
    """Return the backend to use. Raises `NoWorld`.

    `no_mpi` returns why there is no MPI. It is called only if the choice depends on it, as it starts MPI.
    """
    if backend not in REQUESTED_BACKEND:
        raise NoWorld(
            f"backend = {backend!r}: {near_miss(backend, REQUESTED_BACKEND)}", key="backend", value=backend
        )
    if backend == "mpi":
        return Choice("mpi", "asked for")
    launch = launched(environ)
    by_torchrun = launch is not None and not launch.launcher.of_mpi
    rendezvous = default_group() or in_environment(environ)
    if launch is not None:
        _require_one(launch, environ)
    if by_torchrun or backend == "gloo":
        if isinstance(rendezvous, str):
            raise NoWorld(
                f'backend = "gloo": ranks cannot connect ({rendezvous}): {RENDEZVOUS}',
                key="backend",
            )
        return Choice("gloo", "torchrun started them" if by_torchrun else "asked for", rendezvous)
    if launch is not None and launch.size != 1:
        if not (why := no_mpi()):
            return Choice("mpi", f"{launch.launcher.name} started them")
        if isinstance(rendezvous, str):
            raise NoWorld(f"{launch.by} started ranks, but there is no MPI for them ({why}): {REMEDY}")
        return Choice("gloo", f"{launch.launcher.name} started them, and there is no MPI ({why})", rendezvous)
    if not isinstance(rendezvous, str) and rendezvous.size > 1:
        by = (
            f"{TORCH_RANK} and {TORCH_SIZE} say so"
            if rendezvous.url
            else "torch.distributed has a default group"
        )
        return Choice("gloo", by, rendezvous)
    return Choice("gloo", "alone", Place()) if no_mpi() else Choice("mpi", "alone")


def _require_one(launch: Launched, environ: Mapping[str, str]) -> None:
    """Raise `NoWorld` if two launchers have started ranks of different worlds.

    One launcher may start the agents of torchrun, each of which starts ranks.
    """
    agents = environ.get("GROUP_WORLD_SIZE", "")
    for other in all_reported(environ):
        fits = (other.size, other.rank) == (launch.size, launch.rank) or other.size in (1, None)
        if launch.launcher.of_mpi or fits or not agents.isdigit() or other.size == int(agents):
            continue
        raise NoWorld(
            f"{launch.by} and {other.by} have both started ranks, {launch.size} and {other.size}: use one of "
            "them. Where one starts torchrun on each node, give that `--nnodes` and `--rdzv-endpoint`"
        )
    own = [environ.get(name, "") for name in (TORCH_RANK, TORCH_SIZE, ADDRESS, PORT)]
    if launch.size not in (1, None) and all(own) and own[:2] != [str(launch.rank), str(launch.size)]:
        raise NoWorld(
            f"{launch.by} started {launch.size} ranks, of which this is {launch.rank}, but {TORCH_RANK} = "
            f"{own[0]} and {TORCH_SIZE} = {own[1]}: two launchers. "
            f"Use one, or env -u {TORCH_RANK} -u {TORCH_SIZE} …"
        )


def _no_mpi() -> str:
    """Return why no MPI can be loaded; empty if one was loaded, which also starts it."""
    try:
        importlib.import_module("hpcsgd.comm.mpi_library")  # this import starts MPI
    except SystemExit as left:
        return first_line(left.__cause__ or left)
    return ""
