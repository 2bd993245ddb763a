"""Jobs under a real Slurm: four virtual nodes, one rank on each."""

from __future__ import annotations

import json
import sys
import time

import pytest

import programs
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


def test_an_exception_in_one_rank_ends_the_step(srun):
    done = srun(ONE_RANK_FAILS, "--mpi=pmi2")
    assert done.returncode != 0
    assert time.time() - float(done.stdout) < 10
    assert done.stderr.count("RuntimeError: only rank 2 knows") == 1


@pytest.mark.long
def test_lightning_trains_as_a_plain_loop(slurm, tmp_path):
    """The virtual nodes are one machine, and therefore one node for hpcsgd."""
    skip_unless_mpich()
    words = lightning_python([PROGRAM, str(tmp_path / "found"), "bits"])
    done = launch(["srun", "-n", "4", "-N", "4", "--mpi=pmi2", *words], slurm, timeout=programs.TIMEOUT)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "found").read_text().splitlines()
    of_ranks = json.loads(line)["bits"]
    assert len(of_ranks) == 4
    for found in of_ranks:
        assert found["lightning"] == found["plain"] == of_ranks[0]["plain"]
