"""Tests of torchrun's agents that are killed or get a signal, and of the ranks that they have started."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import programs
from comm.jobs import free_port, wait_for
from comm.test_torchrun import exit_code_file, exit_code_in, of_ours, script
from hpcsgd.errors import STOPPED
from pythons import python
from train.launches import JOB, make_store, unlaunched

pytestmark = [pytest.mark.slow, pytest.mark.long]

RANKS = """
import torch
from pathlib import Path
topology = hpcsgd.init(groups=2)
Path({folder!r}, f"rank.{{topology.rank}}").write_text(f"{{os.environ['AGENT']}} {{os.getpid()}}")
topology.world.barrier()
Path({folder!r}, f"ready.{{topology.rank}}").touch()
while True:
    topology.world.allreduce(torch.ones(1000)).wait()
"""


def serves(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("localhost", port)):
        return True
    return False


def test_groups_that_do_not_divide_the_ranks_of_a_restarted_world(tmp_path: Path) -> None:
    """Of two agents with three ranks each, one is killed with its ranks; the other restarts its own."""
    port = free_port()
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "3"),
        *("--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
        *("--rdzv-conf", "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=2"),
        *("--no-python", *python(str(script(tmp_path, RANKS.format(folder=str(tmp_path)))))),
    ]
    agents = [programs.start(agent, env=unlaunched(AGENT="first"), start_new_session=True)]
    try:
        wait_for(lambda: serves(port))  # now the first agent has the store, and lives on
        agents.append(programs.start(agent, env=unlaunched(AGENT="second"), start_new_session=True))
        wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 6)
        ranks = [path.read_text().split() for path in tmp_path.glob("rank.*")]
        programs.kill(agents[1])
        for pid in [int(pid) for agent_of_rank, pid in ranks if agent_of_rank == "second"]:
            with suppress(ProcessLookupError):  # it may have ended with its agent
                os.kill(pid, signal.SIGKILL)
        done = programs.finish(agents[0])
    finally:
        for each in agents:
            programs.kill(each)
            each.communicate()
    assert done.returncode == 1, done
    (line,) = [line for line in of_ours(done) if "divide" in line]
    assert line == "hpcsgd: groups = 2 does not divide the 3 ranks of the job; allowed: 1, 3", done


def test_a_signal_to_the_agent_of_a_training_saves_a_checkpoint(tmp_path: Path) -> None:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    words = [
        *("-m", "hpcsgd", "train", "job.toml", "--training.epochs", "1000000"),
        *("--run.output_dir", "run", "--training.log_every", "1", "--resume"),
    ]
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--no-python", *python(*words)),
    ]
    env = unlaunched(**exit_code_file(tmp_path))
    process = programs.start(agent, cwd=tmp_path, env=env, start_new_session=True)
    wait_for(lambda: has_content(tmp_path / "run" / "metrics.jsonl"))
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process)
    assert done.returncode != 0
    assert exit_code_in(tmp_path) == STOPPED, done
    assert of_ours(done) == []
    (saved,) = re.findall(r"SIGTERM received: saved step (\d+)", done.stdout)
    (tmp_path / "exit-code").unlink()
    again = [*agent, "--training.time_limit_s", "1"]
    resumed = programs.run(again, cwd=tmp_path, env=env, check=False)
    assert exit_code_in(tmp_path) == STOPPED, resumed
    assert f"step {saved}" in resumed.stdout, resumed


def has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
