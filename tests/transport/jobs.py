"""Scripts as jobs of several processes, and how they end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from pythons import python

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
import torch
from hpcsgd.errors import JobError, UserError
from hpcsgd.core.topology import together
from hpcsgd.transport import PeerLost, Service, leave_together, mpi

world = mpi.world(timeout={timeout})
rank = world.rank
print(f"line of rank {{rank}}")
world.barrier()

def fault():
    Path({mark!r}).with_suffix(f".{{rank}}").write_text(str(time.time()))

def work_until_lost():
    while True:
        world.allreduce(torch.ones(1000)).wait()

"""
LIMIT = 10.0  # seconds from the fault to the end of the launcher
KILLED = {9, 137}


class Job(NamedTuple):
    """A script's end: `code` of the launcher, what was printed, seconds since the first fault."""

    code: int
    stdout: str
    stderr: str
    seconds: float


def mpiexec() -> str:
    """As a user would find it: beside this Python, else on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("no mpiexec beside this Python or on PATH")
    return found


def launch(
    folder: Path, body: str, *, first: str = "", timeout: float = 60, n: int = 4, interrupt: bool = False
) -> Job:
    """A job whose ranks do `first` and, once they are in touch, `body`."""
    mark = folder / "fault"
    (folder / "job.py").write_text(first + PREAMBLE.format(timeout=timeout, mark=str(mark)) + body)
    start = python(str(folder / "job.py"))
    command = start if n == 1 else [mpiexec(), "-n", str(n), *start]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        start_new_session=True,
    ) as process:
        try:
            if interrupt:
                wait_for(lambda: len(list(folder.glob("fault.*"))) == n)
                process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=90)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    ended = time.time()
    texts = [path.read_text() for path in folder.glob("fault.*")]
    faults = [float(text) for text in texts if text]  # a rank may be killed while it writes
    assert faults, f"the job never got to its fault:\n{stdout}{stderr}"
    return Job(process.returncode, stdout, stderr, ended - min(faults))


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
