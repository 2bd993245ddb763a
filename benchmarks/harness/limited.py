"""Run a program with a time limit, write its log as it runs, and leave none of its processes behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep

from harness import programs
from harness.load import descendants
from harness.programs import Command

PR_SET_CHILD_SUBREAPER = 36
PAUSE = 0.05
"""Seconds between two checks that all processes have ended."""


def run_limited(
    command: Command,
    log: Path,
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> tuple[str, float]:
    """Append what the program prints to `log`; return how it failed ("" if it did not) and its seconds.

    All processes that it has started are killed when it ends or its time is up. This includes processes with
    a session of their own, such as the ranks of MPICH. Therefore this process becomes the parent of orphans.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    others, started = set(descendants(os.getpid())), perf_counter()
    with log.open("a") as output:
        program = programs.start(
            command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = program.wait(timeout)
            failure = "" if code == 0 else f"code {code}"
        except subprocess.TimeoutExpired:
            failure = f"not over after {timeout:.0f} s"
        finally:
            _kill_all(others)
            program.wait()
    return failure, perf_counter() - started


def _kill_all(others: set[int]) -> None:
    """Kill all descendants of this process except the `others`. Orphans have become its own children."""
    while [pid for pid in set(descendants(os.getpid())) - others if _kill(pid)]:
        sleep(PAUSE)


def _kill(pid: int) -> bool:
    """Kill a process; return False if it had already ended. A zombie is removed from the process table."""
    with suppress(FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.kill(pid, signal.SIGKILL)
            return True
        with suppress(ChildProcessError):  # it is a child of another one
            os.waitpid(pid, os.WNOHANG)
    return False
