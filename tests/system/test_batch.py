"""Batch jobs under a real Slurm: they come back after every interruption, but not after a mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from hpcsgd.cluster.batch.script import template
from hpcsgd.cost.machine import load as load_machine
from hpcsgd.data import convert
from hpcsgd.train.probe_answer import fitting
from jobs import Runs
from system.machines import launch, skip_unless_mpich

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

JOBS = Path(__file__).parents[2] / "jobs"
PATIENCE = 240.0  # seconds; the machine may be busy
SLOWLY = {"SECONDS_PER_STEP": "0.4"}
FOUR = ("--nodes", "2", "--ranks-per-node", "2")


class Cluster:
    """A user of the Slurm, in a folder with a job file, its model and its data."""

    def __init__(self, folder: Path, slurm: dict[str, str]) -> None:
        self.runs = Runs(folder)
        self.folder = folder
        self._environment = slurm

    def do(
        self, *command: str | Path, code: int | None = 0, environment: Mapping[str, str] | None = None
    ) -> str:
        """Run a command that must end with `code` (None: any), and return what it prints."""
        here = os.getcwd()
        os.chdir(self.folder)
        try:
            done = launch(command, {**self._environment, **(environment or {})})
        finally:
            os.chdir(here)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def job_train(self, run: str, *options: str, command: str = "train", **environment: str) -> str:
        """Run `hpcsgd job train --submit`, or another `command`, and return the number of the job."""
        words = ["job", command, "job.toml", "--run.output_dir", f"runs/{run}", "--submit", *options]
        said = self.do(sys.executable, "-m", "hpcsgd", *words, environment=environment)
        return said.split()[-1]

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\S+)", self.do("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def restarts(self, job: str) -> int:
        found = re.search(r"Restarts=(\d+)", self.do("scontrol", "show", "job", job))
        assert found is not None
        return int(found[1])

    def log(self, run: str, job: str) -> str:
        path = next((self.folder / "runs").glob(f"{run}-*-{job}.log"), Path("none yet"))
        return path.read_text() if path.exists() else ""

    def wait(self, happened: Callable[[], bool], log: Callable[[], str]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, self.do("squeue") + log()
            time.sleep(0.2)

    def ended(self, run: str, job: str) -> tuple[str, str]:
        """Wait until the job has ended, and return its state and its log."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        self.wait(lambda: self.state(job) in final, lambda: self.log(run, job))
        return self.state(job), self.log(run, job)

    def goes_on(self, run: str, job: str, steps: int) -> None:
        """Wait until the run has made `steps` more steps."""
        goal = self.runs.step(f"runs/{run}") + steps
        self.wait(lambda: self.runs.step(f"runs/{run}") >= goal, lambda: self.log(run, job))

    def comes_back(self, run: str, job: str, restart: int) -> None:
        self.wait(
            lambda: self.restarts(job) == restart and self.state(job) == "RUNNING",
            lambda: self.log(run, job),
        )


@pytest.fixture(scope="module")
def cluster(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    skip_unless_mpich()  # MPICH's plugin of srun, pmi2, is part of every Slurm
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("cluster")
    convert("digits", None, folder / "digits.h5")
    return Cluster(folder, slurm)


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> dict[str, torch.Tensor]:
    """Return the model of a job that was not interrupted."""
    job = cluster.job_train("whole", *FOUR)
    state, log = cluster.ended("whole", job)
    assert state == "COMPLETED", log
    assert "train.sbatch: complete" in log
    return cluster.runs.model("runs/whole")


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    ("groups", "ranks", "said"),
    [
        (2, 2, "2 groups of 2 ranks"),
        pytest.param(4, 2, "4 groups of 2 ranks", marks=pytest.mark.long),
        pytest.param(2, 4, "2 groups of 4 ranks", marks=pytest.mark.long),
    ],
)
def test_a_node_for_each_group(groups: int, ranks: int, said: str, cluster: Cluster) -> None:
    run = f"groups-{groups}-of-{ranks}"
    options = ("--nodes", str(groups), "--ranks-per-node", str(ranks), "--parallel.groups", str(groups))
    job = cluster.job_train(run, *options, "--training.epochs", "1")
    state, log = cluster.ended(run, job)
    assert state == "COMPLETED", log
    assert said in log
    assert "span more than one node" not in log
    assert (cluster.folder / "runs" / run / "model.pt").exists()


@pytest.mark.long
def test_a_comparison_comes_back(cluster: Cluster, whole: dict[str, torch.Tensor]) -> None:
    """A job that is stopped in its second variant continues there and gets the same bits as a plain job."""
    methods = (
        "--methods",
        "bsp, hierarchical sync_every=4",
        "--training.epochs",
        "3",
        "--parallel.groups",
        "2",
    )
    job = cluster.job_train("two", *FOUR, *methods, command="compare", **SLOWLY)
    log = lambda: cluster.log("two", job)  # noqa: E731
    second = "two-compare/hierarchical-sync_every=4"
    cluster.wait(lambda: cluster.runs.step(f"runs/{second}") >= 3, log)
    cluster.do("scancel", "--signal=USR1", job)
    cluster.comes_back("two", job, 1)
    assert "SIGUSR1 received: saved step" in log()
    assert "train.sbatch: stopped with a checkpoint; back to the queue" in log()
    state, said = cluster.ended("two", job)
    assert (state, said.count("\nbsp (1 of 2)\n")) == ("COMPLETED", 1)
    assert "bsp (1 of 2): complete already" in said
    assert "train.sbatch: complete" in said
    assert_same(cluster.runs.model(f"runs/{second}"), whole)


@pytest.mark.long
def test_everything_that_happens_to_a_job(cluster: Cluster, whole: dict[str, torch.Tensor]) -> None:
    """The events happen one after the other. The model has the same bits as that of an undisturbed job."""
    options = ("--training.checkpoint_every_steps", "2", "--training.epochs", "3")
    job = cluster.job_train("eventful", *FOUR, *options, **SLOWLY)
    log = lambda: cluster.log("eventful", job)  # noqa: E731

    cluster.goes_on("eventful", job, 4)
    cluster.do("scancel", "--signal=USR1", job)
    cluster.comes_back("eventful", job, 1)
    assert "SIGUSR1 received: saved step" in log()
    assert "train.sbatch: stopped with a checkpoint; back to the queue" in log()

    cluster.goes_on("eventful", job, 4)
    cluster.do("scontrol", "requeue", job)
    cluster.comes_back("eventful", job, 2)
    assert "SIGTERM received: saved step" in log()

    cluster.goes_on("eventful", job, 4)
    cluster.do("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    cluster.wait(lambda: cluster.state(job) != "RUNNING", log)
    cluster.do("scontrol", "update", "nodename=node2", "state=resume", code=None)  # unless it has resumed
    cluster.comes_back("eventful", job, 3)
    assert "DUE TO NODE FAILURE" in log()

    cluster.goes_on("eventful", job, 4)
    os.kill(int((cluster.folder / "pid-2").read_text()), signal.SIGKILL)
    cluster.comes_back("eventful", job, 4)
    assert "train.sbatch: a rank was killed (exit code 137); back to the queue" in log()

    cluster.goes_on("eventful", job, 4)
    urgent = cluster.do(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 1"
    )
    cluster.comes_back("eventful", job, 5)
    assert "DUE TO PREEMPTION" in log()
    assert cluster.state(urgent.strip()) == "COMPLETED"

    state, _ = cluster.ended("eventful", job)
    assert state == "COMPLETED", log()
    assert log().count("resuming at step") == 5
    assert_same(cluster.runs.model("runs/eventful"), whole)


@pytest.mark.long
def test_a_time_limit_that_is_too_short(cluster: Cluster, whole: dict[str, torch.Tensor]) -> None:
    job = cluster.job_train("short", *FOUR, "--time", "1", SECONDS_PER_STEP="1")
    state, log = cluster.ended("short", job)
    assert state == "COMPLETED", log
    assert cluster.restarts(job) >= 1
    assert "TIMEOUT" not in log
    assert_same(cluster.runs.model("runs/short"), whole)


@pytest.mark.long
def test_a_cancelled_job_does_not_come_back(cluster: Cluster) -> None:
    job = cluster.job_train("cancelled", *FOUR, **SLOWLY)
    cluster.goes_on("cancelled", job, 2)
    cluster.do("scancel", job)
    state, log = cluster.ended("cancelled", job)
    assert state == "CANCELLED"
    assert "SIGTERM received: saved step" in log
    time.sleep(8)  # the time that Slurm takes to requeue a job
    assert cluster.state(job) == "CANCELLED"


def test_a_mistake_is_reported_before_anything_is_asked_for(cluster: Cluster) -> None:
    words = ["job", "train", "job.toml", "--run.output_dir", "runs/mistaken", "--submit", *FOUR]
    said = cluster.do(sys.executable, "-m", "hpcsgd", *words, "--method.sync_evry", "3", code=1)
    assert said.startswith("hpcsgd: job.toml: [method]: ")
    assert "did you mean 'sync_every'?" in said
    assert not (cluster.folder / "runs" / "mistaken-train.sbatch").exists()


def test_a_job_that_the_cluster_cannot_run(cluster: Cluster) -> None:
    words = ["job", "train", "job.toml", "--run.output_dir", "runs/large", "--nodes", "8", "--submit"]
    said = cluster.do(sys.executable, "-m", "hpcsgd", *words, code=1)
    assert "sbatch --test-only runs/large-train.sbatch: allocation failure" in said
    assert "submitted" not in said


@pytest.mark.long
def test_a_mistake_forced_past_the_check_fails_once(cluster: Cluster) -> None:
    (cluster.folder / "train.sbatch").write_text(template("train.sbatch"))
    (cluster.folder / "runs").mkdir(exist_ok=True)  # otherwise Slurm cannot write the log
    words = ["train.sbatch", "job.toml", "--method.sync_evry", "3", "--run.output_dir", "runs/forced"]
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = cluster.do("sbatch", "--parsable", "--output=runs/forced-train-%j.log", *words, environment=python)
    job = said.strip()
    state, log = cluster.ended("forced", job)
    assert state == "FAILED"
    assert log.count("did you mean 'sync_every'?") == 2, log  # printed, and repeated as the reason
    assert "train.sbatch: failed, not restarted: hpcsgd: job.toml: [method]: " in log
    time.sleep(8)
    assert (cluster.state(job), cluster.restarts(job)) == ("FAILED", 0)


@pytest.mark.long
def test_a_loss_that_is_not_finite_fails_once(cluster: Cluster) -> None:
    """All ranks stop soon, with one message, although there are checkpoints from which to resume."""
    options = (
        "--optimizer.lr",
        "1e30",
        "--training.checkpoint_every_steps",
        "1",
        "--lr_schedule.warmup_epochs",
        "0",
    )
    job = cluster.job_train("diverged", *FOUR, *options)
    state, log = cluster.ended("diverged", job)
    assert (state, cluster.restarts(job)) == ("FAILED", 0), log
    assert cluster.runs.checkpoints("runs/diverged")
    assert len(re.findall("^hpcsgd: rank .: the loss is nan", log, re.MULTILINE)) == 1
    assert "train.sbatch: failed, not restarted: hpcsgd: " in log


@pytest.mark.long
def test_probe_then_train(cluster: Cluster) -> None:
    """The templates are chained without any change."""
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = JOBS / "probe-then-train.sh"
    said = cluster.do(script, "job.toml", "--data.group_batch_size", "16", environment=python)
    job = said.split()[-1]
    cluster.wait(lambda: cluster.state(job) in {"COMPLETED", "FAILED", "CANCELLED"}, lambda: said)
    log = (cluster.folder / f"train-{job}.log").read_text()
    assert cluster.state(job) == "COMPLETED", log
    found = json.loads((cluster.folder / "runs" / "job-probe" / "probe.json").read_text())
    P = fitting(found["P"], 4)
    assert re.search(rf"{P} groups? of {4 // P} ranks?, ", log), log
    assert "another training" not in log


@pytest.mark.long
def test_the_bench(cluster: Cluster) -> None:
    words = ["job", "bench", "job.toml", "--run.output_dir", "runs/fast", *FOUR, "--training.epochs", "1"]
    said = cluster.do(sys.executable, "-m", "hpcsgd", *words, "--parallel.groups", "4", "--submit")
    state, log = cluster.ended("fast", said.split()[-1])
    assert state == "COMPLETED", log
    assert "node1" in log
    assert "samples/s" in log


@pytest.mark.long
def test_the_measurement(cluster: Cluster) -> None:
    words = ["job", "measure", "job.toml", "--run.output_dir", "runs/here", *FOUR, "--quick", "--submit"]
    state, log = cluster.ended("here", cluster.do(sys.executable, "-m", "hpcsgd", *words).split()[-1])
    assert state == "COMPLETED", log
    machine = load_machine(cluster.folder / "runs" / "here-machine.toml")
    assert machine.hosts * machine.ranks_per_host == 4
    assert machine.compute is not None
    assert machine.compute.batch_sizes


def test_there_is_no_slurm(cluster: Cluster) -> None:
    """Scripts can also be made where there is no Slurm, for example on a laptop."""
    words = ["job", "train", "job.toml", "--run.output_dir", "runs/laptop", *FOUR]
    assert shutil.which("sbatch", path=str(Path(sys.executable).parent)) is None
    here = {"PATH": str(Path(sys.executable).parent)}
    said = cluster.do(sys.executable, "-m", "hpcsgd", *words, environment=here)
    assert "slurm     not here" in said
    said = cluster.do(sys.executable, "-m", "hpcsgd", *words, "--submit", code=1, environment=here)
    assert "--submit: there is no sbatch here" in said
