"""Start the ranks of a replica group, by mpiexec on this machine or by srun inside a Slurm job."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hpcsgd.cluster.launch.python import of_ranks
from hpcsgd.elastic import addresses
from hpcsgd.errors import UserError, count_text
from hpcsgd.train.job_end import slurm_job

TIMEOUT = 60
"""Seconds to wait for an answer of Slurm."""


class Starter(Protocol):
    """A way to start the ranks of a replica group."""

    @property
    def host(self) -> str:
        """The address of this node at which the ranks reach the coordinator."""
        ...

    @property
    def ranks(self) -> int:
        """The largest number of ranks in all groups together; 0 if the environment does not say."""
        ...

    def command(self, replica_group: int, K: int, program: Sequence[str]) -> list[str]:
        """Return the command that starts `program` on K ranks. Raises `UserError` if it cannot start now."""
        ...


class Mpiexec:
    """The starter that uses mpiexec: all replica groups run on this machine."""

    host = "127.0.0.1"
    ranks = 0

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("mpiexec")
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        if found is None:
            raise UserError("no mpiexec next to this Python or on the PATH, by which groups are started")
        self._mpiexec = found

    def command(self, replica_group: int, K: int, program: Sequence[str]) -> list[str]:
        return [self._mpiexec, "-n", str(K), *program]


class Srun:
    """The starter that uses srun: each replica group is a step of the Slurm job of this process.

    `words`: further options of srun, such as `--mpi=pmi2`. A replica group is restarted on its nodes or, if
    one of them is lost, on the nodes with the fewest groups. Slurm does not free cores of a job that has lost
    a node. So after such a loss, and once ranks have moved between groups, steps share cores.
    """

    def __init__(self, environ: Mapping[str, str], words: Sequence[str]) -> None:
        self._job = slurm_job(environ)
        self._cores = environ.get("SLURM_CPUS_PER_TASK", "1")
        self._words = list(words)
        self._began_with = len(self._nodes())
        self.ranks = int(environ.get("SLURM_NTASKS", "0"))
        self._per_node = max(1, self.ranks // self._began_with)
        self._at: dict[int, list[str]] = {}
        self._ranks_at_first: dict[int, int] = {}
        self._shared = False
        self.host = addresses.of_node(environ.get("SLURMD_NODENAME") or platform.node())
        if environ.get("SLURM_RESTART_COUNT", "0") != "0":
            self._clear_leftovers()

    def command(self, replica_group: int, K: int, program: Sequence[str]) -> list[str]:
        """Return the command that starts `program` on K ranks of a replica group.

        A rank that dies ends its step, but a lost node does not end the job.
        """
        now = self._nodes()
        here = self._at[replica_group] = self._place(replica_group, K, now)
        placed = [f"--nodelist={','.join(here)}", f"--nodes={len(here)}", f"--ntasks={K}"]
        ending = [f"--cpus-per-task={self._cores}", "--kill-on-bad-exit=1", "--no-kill"]
        resized = self._ranks_at_first.setdefault(replica_group, K) != K
        self._shared = self._shared or resized or len(now) < self._began_with
        shared = ["--overlap", "--cpu-bind=none"] if self._shared else ["--exact"]
        return ["srun", *placed, *ending, *self._words, *shared, *program]

    def _place(self, replica_group: int, K: int, now: Sequence[str]) -> list[str]:
        count, before = -(-K // self._per_node), self._at.get(replica_group, [])
        if len(before) == count and set(before) <= set(now):
            return before
        if count > len(now):
            raise UserError(
                f"a group of {count_text(K, 'rank')} needs {count_text(count, 'node')}, the job has "
                f"{len(now)}"
            )
        used = Counter(node for other, nodes in self._at.items() if other != replica_group for node in nodes)
        return sorted(sorted(now, key=now.index), key=lambda node: used[node])[:count]

    def _clear_leftovers(self) -> None:
        each_node = [f"--nodes={self._began_with}", f"--ntasks={self._began_with}", "--ntasks-per-node=1"]
        clear = [of_ranks(), "-m", "hpcsgd.cluster.launch.leftovers"]
        words = ["srun", *each_node, "--overlap", "--mpi=none", *clear]
        subprocess.run(words, check=False, stdin=subprocess.DEVNULL)

    def _nodes(self) -> list[str]:
        """Return the job's nodes, without those that it has lost."""
        names = _reported("squeue", "--noheader", f"--jobs={self._job}", "--format=%N")
        return _reported("scontrol", "show", "hostnames", names).split()


def _reported(*command: str) -> str:
    """Return the output of a command of Slurm. Raises `UserError` if it fails, as while Slurm restarts."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().rpartition("\n")[2]
        raise UserError(
            f"{' '.join(command)}: Slurm does not tell the nodes of this job: {why}: "
            "start again once it answers"
        ) from error
    return done.stdout.strip()


def starter(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Starter:
    """Return `Srun` with the options `words` inside a Slurm job, otherwise `Mpiexec`."""
    if "SLURM_JOB_ID" in environ and shutil.which("srun") is not None:
        return Srun(environ, words)
    if words:
        raise UserError(f"--srun {' '.join(words)}: not inside a Slurm job, so nothing is started by srun")
    return Mpiexec()


def sizes(groups: int | None, group_size: int | None, ranks: int) -> list[int]:
    """Return the number of ranks of each group. Raises `UserError` if the arguments do not give it."""
    if groups is None:
        raise UserError("how many groups? give --groups, or groups in the [parallel] section")
    if group_size is None:
        if ranks and ranks % groups:
            raise UserError(
                f"{count_text(groups, 'group')} of {count_text(ranks, 'task')}: give a group size, or "
                "fitting tasks"
            )
        group_size = ranks // groups if ranks else 1
    if ranks and groups * group_size > ranks:
        raise UserError(
            f"{count_text(groups, 'group')} of {group_size} are more than the {count_text(ranks, 'task')} "
            "of this job"
        )
    return [group_size] * groups
