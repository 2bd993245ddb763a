"""Everything that tests set up is removed when they end, however they end."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import programs
from system.machines import HERE, free_ports, skip_unless_root_with

STARTER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they start beside them ignore it
from system.machines import held
with held(*sys.argv[1:]):
    print("up", flush=True)
    time.sleep(600)
"""


def start(*args: str | Path | int) -> programs.Running:
    """Start another process that calls `held` with these arguments, and wait until that is done."""
    call = [sys.executable, "-c", STARTER, *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    starter = programs.start(call, env=env)
    assert starter.stdout is not None
    assert starter.stdout.readline() == "up\n"
    return starter


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_slurm_goes_with_its_starter(end: signal.Signals) -> None:
    skip_unless_root_with("slurmctld", "slurmd", "srun", "munged", "setpriv")
    root = Path(tempfile.mkdtemp(prefix="hpcsgd-slurm-"))
    with start("slurm", root, 1, 1, free_ports(2)) as starter:
        job = ["sbatch", "-o", "/dev/null", "--wrap", "sleep 600"]
        programs.run(job, env={**os.environ, "SLURM_CONF": str(root / "slurm.conf")})
        daemons = [int(file.read_text()) for file in (*root.glob("pid/*.pid"), *root.glob("munge/*.pid"))]
        assert len(daemons) == 3
        assert all(map(alive, daemons))
        starter.send_signal(end)
    wait_for(lambda: not root.exists())
    assert not any(map(alive, daemons))


@pytest.mark.network
def test_hosts_go_with_their_starter() -> None:
    skip_unless_root_with("ip", "tc", "unshare")
    if programs.run(["unshare", "--net", "true"], check=False).returncode != 0:
        pytest.skip("this root may not make network namespaces")
    name = f"held-{os.getpid()}"

    def there() -> bool:
        found = programs.run(["ip", "netns", "list"])
        return name in found.stdout

    with start("net", name, 1, "100mbit") as starter:
        assert there()
        starter.send_signal(signal.SIGKILL)
    wait_for(lambda: not there())
