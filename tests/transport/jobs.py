"""Scripts as jobs of several processes, and how they end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import NamedTuple

import programs
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


def launch(
    folder: Path, body: str, *, first: str = "", timeout: float = 60, n: int = 4, interrupt: bool = False
) -> Job:
    """A job whose ranks do `first` and, once they are in touch, `body`."""
    mark = folder / "fault"
    (folder / "job.py").write_text(first + PREAMBLE.format(timeout=timeout, mark=str(mark)) + body)
    start = python(str(folder / "job.py"))
    command = start if n == 1 else [programs.mpiexec(), "-n", str(n), *start]
    process = programs.start(command, start_new_session=True)
    if interrupt:
        try:
            wait_for(lambda: len(list(folder.glob("fault.*"))) == n)
        except BaseException:
            programs.kill(process)
            raise
        process.send_signal(signal.SIGINT)
    done = programs.finish(process, 90)
    ended = time.time()
    texts = [path.read_text() for path in folder.glob("fault.*")]
    faults = [float(text) for text in texts if text]  # a rank may be killed while it writes
    assert faults, f"the job never got to its fault:\n{done.stdout}{done.stderr}"
    return Job(done.returncode, done.stdout, done.stderr, ended - min(faults))


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
