"""A batch job of PBS and of Flux from its first start to its end.

The script that `hpcsgd job` makes, the training and MPI are real. Stand-ins replace the scheduler;
stand_ins.py says how they behave.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from cluster.batch.stand_ins import Queue
from hpcsgd.data import convert
from jobs import Runs
from system.machines import skip_unless_mpich
from train.launches import HPCSGD, ended, start, unlaunched

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SLOWLY = "export SECONDS_PER_STEP=0.5 OMP_NUM_THREADS=1\n"
SHORT = ("--training.epochs", "1")
QUICKLY = "export SECONDS_PER_STEP=0 OMP_NUM_THREADS=1\n"


class User:
    """A user with a folder that contains a job file, its model and its data; the queue is empty."""

    def __init__(self, folder: Path, queue: Queue) -> None:
        self.runs = Runs(folder)
        self.folder = folder
        self.queue = queue
        convert("digits", None, folder / "digits.h5")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environ = queue.environment(unlaunched(PATH=path, HOME=str(folder)))
        (folder / "site.toml").write_text(f'setup = "pace.sh"\nscheduler = "{queue.name}"\n')

    def submits(self, run: str) -> str:
        """Submit a job and return its number."""
        words = ["job", "train", "job.toml", "--run.output_dir", f"runs/{run}", *SHORT]
        size = ["--nodes", "1", "--ranks-per-node", "2", "--submit"]
        done = ended(start(self.folder, [*HPCSGD, *words, *size], **self.environ))
        assert done.code == 0, done.err
        return done.out.split()[-1]

    def starts(self, number: str, pace: str, left: float = 3600.0) -> int:
        (self.folder / "pace.sh").write_text(pace)
        return self.queue.run(number, left)

    def log(self, run: str, first: str) -> str:
        return (self.folder / "runs" / f"{run}-train-{first}.log").read_text()


@pytest.fixture(params=["pbs", "flux"])
def user(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    skip_unless_mpich()
    pytest.importorskip("sklearn")
    queue = Queue(tmp_path / "queue", flux=request.param == "flux")
    queue.install()
    user = User(tmp_path, queue)
    for name in set(os.environ) - set(user.environ):
        monkeypatch.delenv(name)
    for name in ("HOME", "PATH"):  # the variables of a user's login
        monkeypatch.setenv(name, user.environ[name])
    return user


def test_a_job_whose_time_is_too_short(user: User) -> None:
    """It saves, is submitted again and resumes. The result equals that of a job with enough time."""
    first = user.submits("short")
    assert user.starts(first, SLOWLY, left=2) == 75
    log = user.log("short", first)
    assert "the batch job ends soon: saved step" in log
    (second,) = user.queue.waiting()
    assert f"stopped with a checkpoint; goes on as job {second}" in log
    assert user.queue.read(second)["after"] == first, "two of them would write into one folder"

    assert user.starts(second, QUICKLY) == 0
    log = user.log("short", first)
    assert "resuming at step" in log
    assert log.rstrip().endswith(": complete")
    assert user.queue.waiting() == []

    user.runs.train("runs/whole", *SHORT, n=2)
    ours, theirs = user.runs.model("runs/short"), user.runs.model("runs/whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
