"""Jobs under a real Slurm: four virtual nodes, one rank on each."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import programs
from comm.jobs import LIMIT, Job, by_srun
from comm.test_torchrun import CASES
from hpcsgd.errors import EXIT_CODE_FILE, PEER_LOST, STOPPED
from lightning_runs import PROGRAM, lightning_python
from system.machines import launch, skip_unless_mpich

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

WORLD = """
import json, hpcsgd
topology = hpcsgd.init(groups=2)
print(json.dumps([topology.world.rank, topology.world.size, topology.num_groups, topology.group_size]),
flush=True)
"""

ONE_RANK_FAILS = """
import time, torch, hpcsgd
topology = hpcsgd.init(groups=2)
topology.world.barrier()
if topology.world.rank == 2:
    print(time.time(), flush=True)
    raise RuntimeError("only rank 2 knows")
topology.world.allreduce(torch.ones(1)).wait()
"""


@pytest.fixture
def srun(slurm):
    skip_unless_mpich()  # MPICH's plugin of srun, pmi2, is part of every Slurm

    def call(program, *options):
        return launch(["srun", "-n", "4", "-N", "4", *options, sys.executable, "-c", program], slurm)

    return call


def test_four_ranks_see_one_world(srun):
    done = srun(WORLD, "--mpi=pmi2")
    assert done.returncode == 0, done.stderr
    assert sorted(map(json.loads, done.stdout.splitlines())) == [[rank, 4, 2, 2] for rank in range(4)]


TOLD = """
import dataclasses, json, os
from hpcsgd.launcher import launched
told = launched(os.environ)
print(json.dumps({**dataclasses.asdict(told), "by": told.by}), flush=True)
"""


@pytest.mark.parametrize(
    ("option", "by"),
    [
        ("--mpi=pmi2", "mpiexec or srun with PMI (PMI_SIZE)"),
        ("--mpi=none", "srun (SLURM_STEP_NUM_TASKS)"),
    ],
)
def test_what_srun_tells_its_ranks(srun, option, by):
    done = srun(TOLD, option, "--ntasks=8", "--nodes=4", "--ntasks-per-node=2")
    assert done.returncode == 0, done.stderr
    told = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda each: each["rank"])
    assert {each["by"] for each in told} == {by}
    assert [(each["size"], each["rank"], each["local_rank"]) for each in told] == [
        (8, rank, rank % 2) for rank in range(8)
    ]


def test_four_worlds_of_one_rank_are_an_error(srun):
    done = srun(WORLD)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "started 4 ranks" in done.stderr
    assert "a world of 1" in done.stderr


def test_an_exception_in_one_rank_ends_the_step(srun, tmp_path):
    """srun itself ends with the highest code of all ranks, which is that of a killed one."""
    code = tmp_path / "exit-code"
    done = srun(ONE_RANK_FAILS, "--mpi=pmi2", f"--export=ALL,{EXIT_CODE_FILE}={code}")
    assert done.returncode != 0
    assert code.read_text() == "1\n"
    assert time.time() - float(done.stdout) < 10
    assert done.stderr.count("RuntimeError: only rank 2 knows") == 1


@pytest.mark.long
def test_lightning_trains_as_a_plain_loop(slurm, tmp_path):
    """On as many nodes as ranks."""
    skip_unless_mpich()
    words = lightning_python([PROGRAM, str(tmp_path / "found"), "bits"])
    command = ["srun", "-n", "4", "-N", "4", "--mpi=pmi2", *words]
    done = launch(command, slurm | {"HPCSGD_TEST_NODES": "4"}, timeout=programs.TIMEOUT)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "found").read_text().splitlines()
    of_ranks = json.loads(line)["bits"]
    assert len(of_ranks) == 4
    for found in of_ranks:
        assert found["lightning"] == found["plain"] == of_ranks[0]["plain"]


NODES = "\n".join(f"127.0.0.1 node{i + 1}" for i in range(4))
"""The addresses of the virtual nodes, as a cluster's name service has them."""
NO_MPI = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
FIRST_LINE = "logging.basicConfig(format='%(name)s: %(message)s', level=logging.INFO)"
JOINED = f"""
import logging, torch, hpcsgd
{FIRST_LINE}
topology, x = hpcsgd.init(groups=2), torch.ones(1)
topology.world.allreduce(x).wait()
print(topology.rank, topology.world_size, topology.num_groups, int(x), flush=True)
"""
BY = {"--mpi=none": "srun", "--mpi=pmi2": "mpiexec or srun with PMI"}
"""What the first line of the log names, for an option of srun."""


@pytest.fixture
def on_nodes(tmp_path: Path) -> list[str]:
    """Return a command that starts a rank on each of four nodes. The ranks find each other by name."""
    names = tmp_path / "hosts"
    names.write_text(f"{Path('/etc/hosts').read_text()}\n{NODES}\n")
    named = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(names)]
    if programs.run([*named, "true"], check=False).returncode != 0:
        pytest.skip("this root may not make mount namespaces")
    return ["srun", "-n", "4", "-N", "4", *named]


def with_option(command: list[str], option: str) -> list[str]:
    return [command[0], option, *command[1:]]


@pytest.mark.parametrize("option", BY)
def test_ranks_without_mpi_are_one_world_by_gloo(
    slurm: dict[str, str], on_nodes: list[str], option: str
) -> None:
    command = [*with_option(on_nodes, option), sys.executable, "-c", JOINED]
    done = launch(command, {**slurm, **NO_MPI}, programs.TIMEOUT)
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == [f"{rank} 4 2 4" for rank in range(4)]
    expected = f"hpcsgd.start: 4 ranks by gloo: {BY[option]} started them, and there is no MPI ("
    assert done.stderr.splitlines()[0].startswith(expected), done


@pytest.fixture
def ended(slurm: dict[str, str], on_nodes: list[str], tmp_path: Path) -> Callable[[str, str], Job]:
    """Return a function that runs the script of a case with an option of srun, and returns its end."""

    def end(name: str, option: str) -> Job:
        case = CASES[name]
        start = with_option(on_nodes, option)
        return by_srun(tmp_path, case.body, start, {**slurm, **NO_MPI}, timeout=case.timeout)

    return end


ENDS = {
    "an exception": 1,
    "a rank killed": 137,
    "a rank that hangs": PEER_LOST,
    "all leave with an exit code": STOPPED,
}
"""The exit code of srun for cases of `CASES`. srun returns the highest code: of a killed rank 128 + 9."""


@pytest.mark.parametrize("option", BY)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if "hangs" in name else []) for name in ENDS]
)
def test_ranks_without_mpi_end_together(ended: Callable[[str, str], Job], name: str, option: str) -> None:
    job, case = ended(name, option), CASES[name]
    assert job.code == ENDS[name], job
    assert job.seconds < LIMIT + (case.timeout if case.timeout < LIMIT else 0), job
    ours = [line for line in job.stderr.splitlines() if line.startswith("hpcsgd: ")]
    assert len(ours) == bool(case.message), job
    assert re.search(case.message, "".join(ours)), job
