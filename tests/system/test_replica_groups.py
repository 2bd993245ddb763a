"""jobs/replica_group.sbatch under a real Slurm: groups that are separate jobs come and go as nodes do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcsgd.elastic import event_log
from hpcsgd.elastic.journal import FOLDER, last_claimed
from system.machines import skip_unless_mpich
from system.test_batch import Cluster
from system.test_ensemble import EPOCHS, JOB, NET, TRAIN
from train.launches import make_store

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

RUN = Path("runs") / "apart"


class Array:
    """Three groups of two ranks, submitted as `hpcsgd job ensemble --independent` submits them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.run = cluster, cluster.folder / RUN
        self._slowly = cluster.folder / "slowly"
        self._slowly.write_text("1.0")
        words = ["job", "ensemble", "job.toml", "--independent", "--run.output_dir", str(RUN), "--time", "10"]
        shape = ["--parallel.groups", "3", "--ranks-per-node", "2", "--submit"]
        said = cluster.do(sys.executable, "-m", "hpcsgd", *words, *shape)
        assert "asks for  3 × 1 node for 10: 0.5 node hours a start" in said
        self.number = said.split()[-1]

    def task(self, replica_group: int) -> str:
        return f"{self.number}_{replica_group}"

    def hold(self, replica_group: int) -> None:
        self.cluster.do("scontrol", "requeuehold", self.task(replica_group))

    def wait(self, happened: Callable[[], object]) -> None:
        self.cluster.wait(lambda: bool(happened()), self.logs)

    def wait_for_a_round_of(self, *replica_groups: int) -> None:
        before = len(self.rounds())
        self.wait(lambda: list(replica_groups) in self.rounds()[before:])

    def rounds(self) -> list[list[int]]:
        """Return the groups that counted in each round."""
        return [event["counted"] for event in event_log.of_run(self.run) if event["event"] == "commit"]

    def logs(self) -> str:
        return "".join(
            path.read_text() for path in sorted((self.cluster.folder / "runs").glob("apart-*.log"))
        )

    def hurry(self) -> None:
        self._slowly.unlink()


@pytest.fixture(scope="module")
def cluster(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    skip_unless_mpich()  # MPICH's plugin of srun, pmi2, is part of every Slurm
    folder = tmp_path_factory.mktemp("apart").resolve()
    cluster = Cluster(folder, slurm)
    make_store(folder / "small.h5", TRAIN, 20)
    (folder / "net.py").write_text(NET)
    (folder / "job.toml").write_text(JOB)
    return cluster


@pytest.mark.long  # on one machine: see tests/cluster/launch/test_apart.py
def test_groups_begin_leave_and_return_as_nodes_do(cluster: Cluster) -> None:
    array = Array(cluster)
    array.wait_for_a_round_of(0, 1, 2)
    array.hold(0)  # as if its node were needed for another job
    array.wait_for_a_round_of(1, 2)
    cluster.do("scontrol", "release", array.task(0))
    array.wait_for_a_round_of(0, 1, 2)
    array.hold(1)
    array.hold(2)
    array.wait_for_a_round_of(0)
    assert last_claimed(array.run / FOLDER) > 1, "whoever had the coordinator has left once"
    array.hurry()
    for replica_group in (1, 2):
        cluster.do("scontrol", "release", array.task(replica_group))
    for replica_group in (0, 1, 2):
        array.wait(
            lambda replica_group=replica_group: cluster.state(array.task(replica_group)) == "COMPLETED"
        )
    assert (array.run / "model.pt").exists()
    commits = [event for event in event_log.of_run(array.run) if event["event"] == "commit"]
    assert commits[-1]["epoch"] == EPOCHS
    assert {event["kind"] for event in event_log.of_run(array.run) if event["event"] == "lost"} == {"left"}
    assert "Traceback" not in array.logs()
