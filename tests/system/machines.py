"""Functions that make several machines of one: they skip tests, call scripts and start jobs."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import programs

HERE = Path(__file__).parent


def skip_unless_root_with(*commands: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def skip_unless_mpich() -> None:
    call = [sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]
    library = programs.run(call).stdout
    if "MPICH" not in library:
        pytest.skip(f"written for MPICH, not for {library.splitlines()[0]}")


def launch(command: Sequence[str | Path], env: dict[str, str], timeout: float = 60) -> programs.Done:
    """Run a job as a user would from a fresh shell, without the variables of an outer launcher."""
    return programs.run(command, env=_of_fresh_shell(env), timeout=timeout, check=False)


def _of_fresh_shell(env: dict[str, str]) -> dict[str, str]:
    outer = ("PMI", "MPI_LOCAL", "OMPI_", "PRTE_", "PMIX_", "SLURM_", "HYDI_", "MPIR_CVAR_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return clean | {"OMP_NUM_THREADS": "1"} | env


@contextlib.contextmanager
def held(kind: str, *args: str | Path | int) -> Iterator[None]:
    """Run `kind`-up.sh with these arguments, and undo its effects at the end of the block.

    The effects are also undone if this process ends in any other way, because held.sh then sees that its
    standard input is closed.
    """
    call = [HERE / "held.sh", kind, *map(str, args)]
    with tempfile.TemporaryFile("w+") as said:
        holder = programs.start(call, stdin=programs.PIPE, stderr=said, start_new_session=True)
        assert holder.stdin is not None
        assert holder.stdout is not None
        with holder:
            try:
                if holder.stdout.readline() == "up\n":
                    yield
                    return
            finally:
                holder.stdin.close()
                holder.wait(90)
        said.seek(0)
        raise AssertionError(f"{kind}-up.sh failed\n{said.read()}")


def free_ports(n: int) -> int:
    """Return the first of n consecutive free ports that no other process of these tests uses."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for first in range(16817 + 1000 * worker, 32000, n):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + n):
                held.enter_context(socket.socket()).bind(("", port))
            return first
    pytest.skip(f"no {n} free ports in a row")


class Network:
    """Hosts 10.77.0.1, 10.77.0.2 … and the links between them, as net-up.sh makes them."""

    def __init__(self, name: str, hosts: int) -> None:
        self.name = name
        self.hosts = hosts

    def mpiexec(self, *command: str | Path, timeout: float = 60) -> programs.Done:
        """Run a command with one rank on every host."""
        addresses = ",".join(f"10.77.0.{i + 1}" for i in range(self.hosts))
        launcher = [
            *("ip", "netns", "exec", f"{self.name}-0", programs.mpiexec()),
            *("-launcher", "ssh", "-launcher-exec", HERE / "net-agent.sh"),
            *("-iface", "switch", "-hosts", addresses, "-ppn", "1", "-n", str(self.hosts)),
        ]
        env = {"HPCSGD_NET": self.name, "FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi"}
        return launch([*launcher, *command], env, timeout)

    def torchrun(
        self, folder: Path, *program: str | Path, hosts: int | None = None, ranks: int = 1
    ) -> list[programs.Running]:
        """Start an agent of torchrun on each of the first `hosts`, with `ranks` ranks of a Python program.

        The hosts find each other by their names, which a file in `folder` lists.
        """
        addresses = [f"10.77.0.{i + 1}" for i in range(hosts or self.hosts)]
        names = folder / "hosts"
        lines = [f"{address} {self.name}-{i + 1}" for i, address in enumerate(addresses)]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(addresses))),
            *("--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{addresses[0]}:29500", "--no-python", sys.executable, *map(str, program)),
        ]
        there = f"mount --bind {shlex.quote(str(names))} /etc/hosts && exec {shlex.join(agent)}"
        env = _of_fresh_shell({"HPCSGD_NET": self.name})
        return [
            programs.start([HERE / "net-agent.sh", address, there], env=env, start_new_session=True)
            for address in addresses
        ]
