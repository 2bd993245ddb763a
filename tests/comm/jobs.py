"""Scripts that run as jobs of several processes, and the results of these jobs."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import programs
from pythons import python
from train.launches import unlaunched

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
import torch
from hpcsgd.errors import JobError, UserError
from hpcsgd.core.topology import raise_on_all_ranks
from hpcsgd.comm import PeerLost, RequestServer, joining, exit_all

world = joining.world(timeout={timeout})
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
NOTHING: Mapping[str, str] = MappingProxyType({})


class Job(NamedTuple):
    """The result of a script: the launcher's exit code, the output, and the seconds since the first fault."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    codes: tuple[int, ...] = ()
    """The exit codes of the ranks, if no launcher has started them."""


def launch(
    folder: Path, body: str, *, first: str = "", timeout: float = 60, n: int = 4, interrupt: bool = False
) -> Job:
    """Run a job whose ranks execute `first` and, once they are connected, `body`."""
    start = _written(folder, first, timeout, body)
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
    return _ended(folder, done.returncode, done.stdout, done.stderr)


def by_torchrun(
    folder: Path,
    body: str,
    *,
    timeout: float = 60,
    n: int = 4,
    options: Sequence[str] = (),
    environ: Mapping[str, str] = NOTHING,
) -> Job:
    """Run such a job with torchrun on this host, with `environ` in its environment."""
    start = _written(folder, "", timeout, body)
    words = ["--standalone", "--nproc-per-node", str(n), *options, "--no-python", *start]
    agent = python("-m", "torch.distributed.run", *words)
    done = programs.finish(programs.start(agent, env=unlaunched(**environ), start_new_session=True), 90)
    return _ended(folder, done.returncode, done.stdout, done.stderr)


def by_srun(
    folder: Path, body: str, srun: Sequence[str], environ: Mapping[str, str], *, timeout: float = 60
) -> Job:
    """Run such a job with a command, srun and its options, that starts Python programs on nodes."""
    _written(folder, "", timeout, body)
    command = [*srun, sys.executable, str(folder / "job.py")]
    process = programs.start(command, env=unlaunched(**environ), start_new_session=True)
    done = programs.finish(process, 90)
    return _ended(folder, done.returncode, done.stdout, done.stderr)


def by_agents(folder: Path, body: str, start: Callable[[Path], Sequence[programs.Running]]) -> Job:
    """Run such a job by agents, which `start` starts for a program. `codes` are those of the agents."""
    _written(folder, "", 60, body)
    return _ended_all(folder, [programs.finish(agent, 90) for agent in start(folder / "job.py")])


def by_variables(
    folder: Path, body: str, *, timeout: float = 60, n: int = 4, environ: Mapping[str, str] = NOTHING
) -> Job:
    """Run such a job as separate processes that no launcher supervises."""
    start = _written(folder, "", timeout, body)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
    ranks = [
        programs.start(start, env=unlaunched(**environ, **world, RANK=str(rank)), start_new_session=True)
        for rank in range(n)
    ]
    return _ended_all(folder, [programs.finish(rank, 90) for rank in ranks])


def _ended_all(folder: Path, done: Sequence[programs.Done]) -> Job:
    codes = tuple(each.returncode for each in done)
    out, err = "".join(each.stdout for each in done), "".join(each.stderr for each in done)
    return _ended(folder, max(codes), out, err)._replace(codes=codes)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _written(folder: Path, first: str, timeout: float, body: str) -> list[str]:
    """Write the script, and return the command that runs it as a rank."""
    mark = str(folder / "fault")
    (folder / "job.py").write_text(first + PREAMBLE.format(timeout=timeout, mark=mark) + body)
    return python(str(folder / "job.py"))


def _ended(folder: Path, code: int, stdout: str, stderr: str) -> Job:
    ended = time.time()
    texts = [path.read_text() for path in folder.glob("fault.*")]
    faults = [float(text) for text in texts if text]  # a rank may be killed while it writes
    assert faults, f"the job never got to its fault:\n{stdout}{stderr}"
    return Job(code, stdout, stderr, ended - min(faults))


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
