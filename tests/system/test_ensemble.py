"""jobs/ensemble.sbatch under a real Slurm: the job continues when groups die, one or all of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from hpcsgd.cluster.batch.script import fill, template
from hpcsgd.elastic import event_log
from system.machines import skip_unless_mpich
from system.test_batch import Cluster
from train.launches import make_store

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

GROUPS, RANKS = 4, 2
EPOCHS, TRAIN, B = 20, 96, 4

NET = '''
import os
import time
from pathlib import Path

from torch import nn


class Net(nn.Module):
    """As slow as the file `slowly` says, until it is gone: whoever watches the job has all the time."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(36, 10))

    def forward(self, x):
        if self.training and Path("slowly").exists():
            time.sleep(float(Path("slowly").read_text()))
        return self.inner(x)


def watched(x, generator):
    """As it is, writing down which samples came by."""
    with open(f"seen-{os.environ['SLURM_JOB_ID']}-{os.getpid()}", "a") as file:
        file.writelines(row.numpy().tobytes().hex() + "\\n" for row in x)
    return x
'''

JOB = f"""
data = {{ path = "small.h5", group_batch_size = {B}, transform = "net:watched" }}
model = {{ name = "net:Net" }}
optimizer = {{ lr = 0.1 }}
method = {{ name = "ensemble_sync", sync_every = 3 }}
training = {{ epochs = {EPOCHS}, log_every = 1 }}
"""


class Groups:
    """A job of four groups of two ranks on four nodes. A step takes `seconds` until `hurry()`."""

    def __init__(self, cluster: Cluster, name: str, seconds: float = 0.5, **options: str) -> None:
        self.cluster, self.name = cluster, name
        self.run = cluster.folder / "runs" / name
        self._slowly = cluster.folder / "slowly"
        self._slowly.write_text(str(seconds))
        self.run.parent.mkdir(exist_ok=True)
        asked = {
            "nodes": "4", "ntasks-per-node": str(RANKS), "time": "10",
            "output": f"runs/{name}-ensemble-%j.log", **options,
        }  # fmt: skip
        values = {
            "NUM_GROUPS": str(GROUPS),
            "HEARTBEAT_TIMEOUT": "10",
            "PYTHON": sys.executable,
            "RUN": f"runs/{name}",
        }
        (cluster.folder / f"{name}.sbatch").write_text(fill(template("ensemble.sbatch"), asked, values))
        self.job = cluster.do("sbatch", "--parsable", f"{name}.sbatch", "job.toml").strip()

    def trains(self, restart: int = 0) -> None:
        """Wait until all groups have averaged twice since restart number `restart` of the job."""
        self.cluster.wait(lambda: self._synchronizations(restart) > 1, self.log)

    def has_saved(self) -> None:
        self.cluster.wait(lambda: any((self.run / "checkpoints").glob("step-*")), self.log)

    def returned(self, *replica_groups: int) -> None:
        """Wait until these groups were lost, came back, and train with the others again."""
        self.cluster.wait(
            lambda: all(self._has_returned(replica_group) for replica_group in replica_groups), self.log
        )

    def hurry(self) -> None:
        self._slowly.unlink()

    def completed(self) -> None:
        state, log = self.cluster.ended(self.name, self.job)
        assert state == "COMPLETED", log
        assert "ensemble.sbatch: complete" in log
        for name in ("model.pt", "summary.json", "curves.png"):
            assert (self.run / name).exists(), name
        assert len(self.events("finished")) == 1
        assert not self.processes()

    def log(self) -> str:
        return self.cluster.log(self.name, self.job)

    def events(self, *kinds: str) -> list[event_log.Event]:
        path = self.run / "events.jsonl"
        events = event_log.read(path) if path.exists() else []
        return [event for event in events if event["event"] in kinds]

    def of(self, replica_group: int, *kinds: str) -> list[event_log.Event]:
        return [event for event in self.events(*kinds) if event["replica_group"] == replica_group]

    def seen(self) -> Counter[str]:
        """Return how often each sample was read."""
        files = self.cluster.folder.glob(f"seen-{self.job}-*")
        return Counter("".join(path.read_text() for path in files).split())

    def processes(self) -> dict[tuple[int, int], tuple[int, str]]:
        """Return the process and the node of each rank of each group."""
        found: dict[tuple[int, int], tuple[int, str]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cwd").readlink() != self.cluster.folder:
                    continue
                words = (entry / "environ").read_text(errors="replace").split("\0")
                told = dict(word.split("=", 1) for word in words if "=" in word)
                if (
                    told.get("SLURM_JOB_ID") == self.job
                    and {"PMI_RANK", "HPCSGD_REPLICA_GROUP"} <= told.keys()
                ):
                    rank = json.loads(told["HPCSGD_REPLICA_GROUP"])["replica_group"], int(told["PMI_RANK"])
                    found[rank] = int(entry.name), told["SLURMD_NODENAME"]
        return found

    def _synchronizations(self, restart: int) -> int:
        """Return the number of rounds of all groups since that start of the job, or -1 before it."""
        rounds = -1
        for event in self.events("started", "commit"):
            if event["event"] == "started" and (event["replica_group"], event["life"]) == (0, "1"):
                restart, rounds = restart - 1, 0
            rounds += event["event"] == "commit" and len(event["counted"]) == GROUPS
        return rounds if restart < 0 else -1

    def _has_returned(self, replica_group: int) -> bool:
        is_back, lost = False, False
        for event in self.events("lost", "generation", "commit"):
            if event["event"] == "lost" and event["replica_group"] == replica_group:
                lost, is_back = True, False
            elif event["event"] == "generation" and lost and replica_group in event["members"]:
                is_back = True
            elif event["event"] == "commit" and is_back and replica_group in event["counted"]:
                return True
        return False


@pytest.fixture(scope="module")
def cluster(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    skip_unless_mpich()  # MPICH's plugin of srun, pmi2, is part of every Slurm
    folder = tmp_path_factory.mktemp("ensemble").resolve()
    cluster = Cluster(folder, slurm)
    make_store(folder / "small.h5", TRAIN, 20)
    (folder / "net.py").write_text(NET)
    (folder / "job.toml").write_text(JOB)
    return cluster


def assert_each_sample_once_an_epoch(groups: Groups) -> None:
    seen = groups.seen()
    assert len(seen) == TRAIN
    assert max(seen.values()) == EPOCHS
    if not groups.events("lost"):  # they can be lost on a very busy machine
        assert set(seen.values()) == {EPOCHS}
        assert groups.events("commit")[-1]["t"] == EPOCHS * TRAIN // (GROUPS * B)


@pytest.mark.long  # on one machine: see tests/cluster/launch/test_launch.py
def test_a_rank_is_killed(cluster: Cluster) -> None:
    """Its group is lost, is started again on the same node, and returns."""
    groups = Groups(cluster, "killed")
    groups.trains()
    before = groups.processes()
    assert len(before) == GROUPS * RANKS
    os.kill(before[1, 1][0], signal.SIGKILL)
    groups.returned(1)
    after = groups.processes()
    assert after[1, 1][1] == before[1, 1][1], "on its node"
    groups.hurry()
    groups.completed()
    assert "hpcsgd: replica group 1 died with exit code 137" in groups.log()
    assert groups.of(1, "lost")[0]["kind"] == event_log.Loss.DIED
    assert groups.of(1, "ended")[0]["code"] == 137
    assert [event["life"] for event in groups.of(1, "started")][:2] == ["1", "2"]
    assert cluster.restarts(groups.job) == 0
    assert "lost 1 time, returned 1 time" in groups.log() or len(groups.events("lost")) > 1


@pytest.mark.long
def test_a_node_is_lost(cluster: Cluster) -> None:
    """Its group comes back on one of the remaining nodes."""
    groups = Groups(cluster, "node")
    groups.trains()
    node = groups.processes()[2, 0][1]
    assert node != groups.processes()[0, 0][1], "not that of the batch step"
    cluster.do("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        groups.returned(2)
        assert groups.processes()[2, 0][1] != node
        groups.hurry()
        groups.completed()
    finally:
        cluster.do("scontrol", "update", f"nodename={node}", "state=resume", code=None)
    assert len(groups.of(2, "started")) >= 2
    assert cluster.restarts(groups.job) == 0
    cluster.wait(lambda: cluster.do("sinfo", "-h", "-n", node, "-o", "%T").strip() == "idle", groups.log)


@pytest.mark.long
def test_all_groups_are_killed(cluster: Cluster) -> None:
    """All groups start again from the checkpoint."""
    groups = Groups(cluster, "all")
    groups.trains()
    groups.has_saved()
    for pid, _ in groups.processes().values():
        os.kill(pid, signal.SIGKILL)
    groups.returned(*range(GROUPS))
    groups.hurry()
    groups.completed()
    assert "resuming at step" in groups.log()
    for replica_group in range(GROUPS):
        assert [event["life"] for event in groups.of(replica_group, "started")][:2] == ["1", "2"]
    assert cluster.restarts(groups.job) == 0
    t = [event["t"] for event in groups.events("commit")]
    assert t[-1] == EPOCHS * TRAIN // (GROUPS * B) or len(groups.events("lost")) > GROUPS


@pytest.mark.long
def test_a_time_limit_that_is_too_short(cluster: Cluster) -> None:
    groups = Groups(cluster, "short", seconds=1.5, time="3", signal="USR1@60")
    groups.trains()
    cluster.comes_back("short", groups.job, 1)
    groups.hurry()
    groups.completed()
    assert "ensemble.sbatch: stopped with a checkpoint; back to the queue" in groups.log()
    assert "resuming at step" in groups.log()
    assert len(groups.events("stopped")) == cluster.restarts(groups.job)
    assert_each_sample_once_an_epoch(groups)


@pytest.mark.long
def test_requeued_by_hand_it_comes_back(cluster: Cluster) -> None:
    """The job comes back although killed ranks have left behind what could disturb MPI."""
    groups = Groups(cluster, "requeued")
    groups.trains()
    groups.has_saved()
    for rank in range(RANKS):
        os.kill(groups.processes()[3, rank][0], signal.SIGSTOP)
    cluster.do("scontrol", "requeue", groups.job)
    cluster.comes_back("requeued", groups.job, 1)
    groups.trains(restart=1)
    groups.hurry()
    groups.completed()
    assert cluster.restarts(groups.job) == 1
    assert "the coordinator died" not in groups.log()
    assert "resuming at step" in groups.log()


@pytest.mark.long
def test_a_cancelled_job_does_not_come_back(cluster: Cluster) -> None:
    groups = Groups(cluster, "cancelled")
    groups.trains()
    cluster.do("scancel", groups.job)
    state, log = cluster.ended("cancelled", groups.job)
    assert state == "CANCELLED"
    assert "the coordinator died" not in log
    time.sleep(8)  # the time that Slurm takes to requeue a job
    assert (cluster.state(groups.job), cluster.restarts(groups.job)) == ("CANCELLED", 0)
    assert not groups.processes()
