"""How one island is started: by mpiexec on this machine, by srun inside a Slurm job."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hpcsgd.errors import UserError


class Starter(Protocol):
    """Knows how to start K ranks, and where the coordinator can be reached by them."""

    @property
    def host(self) -> str:
        """The address of this node in the network of the ranks."""
        ...

    @property
    def ranks(self) -> int:
        """How many there can be in all islands together; 0 where only the user knows."""
        ...

    def command(self, K: int, program: Sequence[str]) -> list[str]: ...


class Mpiexec:
    """All islands on this machine."""

    host = "127.0.0.1"
    ranks = 0

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("mpiexec")
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        if found is None:
            raise UserError("no mpiexec beside this Python or on the PATH: groups are started by it")
        self._mpiexec = found

    def command(self, K: int, program: Sequence[str]) -> list[str]:
        return [self._mpiexec, "-n", str(K), *program]


class Srun:
    """Job steps of the Slurm job that this process is in. `words`: further options, such as `--mpi=pmi2`."""

    def __init__(self, environ: Mapping[str, str], words: Sequence[str]) -> None:
        self.ranks = int(environ.get("SLURM_NTASKS", "0"))
        node = environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.host = _address(node)
        self._words = list(words)
        self._cores = environ.get("SLURM_CPUS_PER_TASK", "1")
        self._per_node = max(1, self.ranks // max(1, int(environ.get("SLURM_NNODES", "1"))))

    def command(self, K: int, program: Sequence[str]) -> list[str]:
        """A rank that dies ends its step (the others would wait for it), but a lost node not the job."""
        nodes = -(-K // self._per_node)
        placed = [f"--nodes={nodes}", f"--ntasks={K}", f"--cpus-per-task={self._cores}"]
        ending = ["--exact", "--kill-on-bad-exit=1", "--no-kill"]
        return ["srun", *placed, *ending, *self._words, *program]


def starter(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Starter:
    """For where we are; `words` are options for srun."""
    if "SLURM_JOB_ID" in environ and shutil.which("srun") is not None:
        return Srun(environ, words)
    if words:
        raise UserError(f"--srun {' '.join(words)}: not inside a Slurm job, so nothing is started by srun")
    return Mpiexec()


def _address(node: str) -> str:
    try:
        return socket.gethostbyname(node)
    except OSError:
        return socket.gethostbyname(socket.gethostname())
