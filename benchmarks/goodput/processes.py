"""Find and end the processes of a contestant: those whose working directory is its folder."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

RANK = "GOODPUT_RANK"
"""The environment variable with the rank of processes to which no launcher gives one."""
PATIENCE = 30.0


def at_work(folder: Path) -> dict[int, dict[str, str]]:
    """Return the environments of the processes in this folder, by process id, without zombies."""
    found: dict[int, dict[str, str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink() == folder:
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                found[int(entry.name)] = dict(word.split("=", 1) for word in words if "=" in word)
    return found


def ranks_in(folder: Path, K: int) -> dict[int, int]:
    """Return the process id of each rank of the job."""
    found: dict[int, int] = {}
    for pid, env in at_work(folder).items():
        if (rank := rank_of(env, K)) is not None:
            found[rank] = pid
    return found


def rank_of(env: dict[str, str], K: int) -> int | None:
    """Return the rank of a process in its job, or None.

    It comes from the variables of MPICH, Open MPI, this benchmark or torch's elastic agent, and from the
    index of the process's replica group.
    """
    place = next(
        (env[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", RANK, "RANK") if name in env), None
    )
    if place is None:
        return None
    invited = env.get("HPCSGD_REPLICA_GROUP")
    return int(place) + (K * json.loads(invited)["replica_group"] if invited else 0)


def kill_all(folder: Path) -> None:
    """Kill all processes in this folder, and wait until none is left."""
    deadline = time.monotonic() + PATIENCE
    while left := at_work(folder):
        assert time.monotonic() < deadline, f"these do not end: {left.keys()}"
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def wait_for(happened: Callable[[], object], look: Callable[[], None], limit: float) -> None:
    """Call `look` again and again until `happened()` is true."""
    deadline = time.monotonic() + limit
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened within {limit:g} s")
        look()
        time.sleep(0.1)
