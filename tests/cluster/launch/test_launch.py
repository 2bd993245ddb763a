"""Tests of `hpcsgd launch` with real processes: groups are killed, frozen and stopped, and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import programs
from cluster.launch.slow_runs import EPOCHS, TRAIN, at_work, hurry, is_of, prepare, seen
from hpcsgd.cluster.launch.run import coordinator_arguments
from hpcsgd.config.schema import load
from hpcsgd.elastic import event_log
from hpcsgd.report.run_folder import replica_group_folder
from train import launches
from train.launches import HPCSGD

pytestmark = pytest.mark.timeout(600)

PATIENCE, SOON = 180.0, 60.0  # seconds; the machine may be busy
TWO = ("--groups", "2")


class Launch:
    """One `hpcsgd launch` of two groups of two ranks, in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        prepare(folder)

    def start(self, *options: str) -> None:
        """Start the launcher, and return when both groups have averaged their models."""
        programs.mpiexec()
        words = ["launch", "job.toml", "--run.output_dir", str(self.run), *TWO, "--group-size", "2"]
        before = len(self.events("commit"))
        with (self.folder / "printed").open("ab") as printed:
            self.process = programs.start(
                [*HPCSGD, *words, *options], cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=printed, stderr=printed,
            )  # fmt: skip
        self.wait(lambda: any(commit["counted"] == [0, 1] for commit in self.events("commit")[before:]))
        self.coordinator = json.loads(at_work(self.folder)[self.ranks(0)[0]]["HPCSGD_REPLICA_GROUP"])[
            "coordinator"
        ]

    def end(self) -> int:
        """Wait for the end of the launcher and return its exit code."""
        self.wait(lambda: self.process.poll() is not None, ends=True)
        return self.process.returncode

    def wait(self, happened: Callable[[], bool], *, ends: bool = False) -> None:
        """Wait until `happened()` is true; with `ends` the launcher may end meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert ends or self.process.poll() is None or happened(), self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.05)

    def printed(self) -> str:
        return (self.folder / "printed").read_text()

    def events(self, *kinds: str) -> list[event_log.Event]:
        path = self.run / "events.jsonl"
        events = event_log.read(path) if path.exists() else []
        return [event for event in events if event["event"] in kinds]

    def of(self, replica_group: int, *kinds: str) -> list[event_log.Event]:
        return [event for event in self.events(*kinds) if event["replica_group"] == replica_group]

    def returned(self, replica_group: int) -> bool:
        """Return True if the group was lost, came back, and trains with the others again."""
        last = ""
        for event in self.events("lost", "late", "generation", "commit"):
            if event.get("replica_group") == replica_group:
                last = "lost"
            elif last == "lost" and replica_group in event.get("newcomers", ()):
                last = "new"
            elif last == "new" and replica_group in event.get("counted", ()):
                return True
        return False

    def ranks(self, replica_group: int) -> list[int]:
        """Return the process ids of the ranks, in order of rank."""
        here = [(pid, env) for pid, env in at_work(self.folder).items() if is_of(replica_group, env)]
        ranks = [(env.get("PMI_RANK", env.get("OMPI_COMM_WORLD_RANK")), pid) for pid, env in here]
        return [pid for rank, pid in sorted((rank, pid) for rank, pid in ranks if rank is not None)]

    def processes(self, replica_group: int | None = None) -> list[int]:
        """Return the processes that were started in this folder, or those of one group and its launcher."""
        return [
            pid
            for pid, env in at_work(self.folder).items()
            if replica_group is None or is_of(replica_group, env)
        ]

    def assert_nothing_is_left(self, within: float) -> None:
        deadline = time.monotonic() + within
        while left := self.processes():
            assert time.monotonic() < deadline, (left, self.printed())
            time.sleep(0.05)
        host, port = self.coordinator.rsplit(":", 1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        assert "Traceback" not in self.printed()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path.resolve())
    yield launch
    for pid in launch.processes():  # processes that a failed test has left
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_is_killed(launch: Launch) -> None:
    """Its group ends, is started again, returns and trains with the other group."""
    launch.start()
    first = launch.processes(1)
    os.kill(launch.ranks(1)[1], signal.SIGKILL)
    launch.wait(lambda: launch.returned(1))
    assert not set(first) & set(launch.processes(1))
    hurry(launch.folder)
    assert launch.end() == 0, launch.printed()
    launch.assert_nothing_is_left(SOON)

    died, *_ = launch.of(1, "lost")
    assert died["kind"] == event_log.Loss.DIED
    ended, *_ = launch.of(1, "ended")
    assert (ended["life"], ended["code"] != 0) == ("1", True)
    assert f"hpcsgd: replica group 1 died with exit code {ended['code']}" in launch.printed()
    assert [event["life"] for event in launch.of(1, "started")][:2] == ["1", "2"]
    assert len(launch.events("finished")) == 1
    for name in ("model.pt", "summary.json", "curves.png"):
        assert (launch.run / name).exists(), name
    starts = json.loads((replica_group_folder(launch.run, 1) / "versions.json").read_text())
    assert [(start["P"], start["K"], start["devices"]) for start in starts][:2] == [(1, 2, {"cpu": 2})] * 2


@pytest.mark.long
def test_all_save_and_stop_and_go_on(launch: Launch) -> None:
    launch.start()
    launch.process.send_signal(signal.SIGUSR1)
    assert launch.end() == 75, launch.printed()
    launch.assert_nothing_is_left(SOON)
    assert "SIGUSR1 received: saved step" in launch.printed()
    assert len(launch.events("stopped")) == 1
    assert not (launch.run / "model.pt").exists()
    stopped = launch.events("commit")[-1]["t"]

    launch.start("--resume")
    hurry(launch.folder)
    assert launch.end() == 0, launch.printed()
    launch.assert_nothing_is_left(SOON)
    assert f"resuming at step {stopped} from a checkpoint of 1 × 2 ranks" in launch.printed()
    assert (launch.run / "model.pt").exists()
    if not launch.events("lost"):  # groups may be lost on a very busy machine
        assert launch.events("commit")[-1]["t"] == EPOCHS * TRAIN // (2 * 8)
        assert set(seen(launch.folder).values()) == {EPOCHS}
    assert len(seen(launch.folder)) == TRAIN
    assert max(seen(launch.folder).values()) == EPOCHS


@pytest.mark.slow
@pytest.mark.long
def test_control_c(launch: Launch) -> None:
    launch.start()
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == 130  # long before the groups' heartbeat timeout
    launch.assert_nothing_is_left(SOON)


@pytest.mark.long
def test_the_launcher_is_killed(launch: Launch) -> None:
    """The coordinator ends with the launcher, and the groups end after their timeout."""
    timeout = 15.0
    launch.start("--heartbeat-timeout", "5", "--timeout", str(timeout))
    launch.process.send_signal(signal.SIGKILL)
    launch.end()
    launch.wait(lambda: len(launch.processes(0) + launch.processes(1)) == len(launch.processes()), ends=True)
    launch.assert_nothing_is_left(4 * timeout)


QUORUM = ("--method.quorum", "1", "--method.grace_s", "1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--heartbeat-timeout", "4"), event_log.Loss.SILENT),
        (("--heartbeat-timeout", "60", *QUORUM), event_log.Loss.LATE),
    ],
    ids=["silent", "quorum"],
)
def test_an_group_freezes(launch: Launch, options: tuple[str, ...], kind: event_log.Loss) -> None:
    """The other group continues without the frozen one until it runs again."""
    launch.start(*options)
    frozen = launch.processes(1)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    launch.wait(lambda: bool(launch.of(1, "lost")))
    alone = len(launch.events("commit"))
    launch.wait(lambda: len(launch.events("commit")) > alone)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    launch.wait(lambda: launch.returned(1))
    assert set(launch.processes(1)) == set(frozen), "the same processes"
    hurry(launch.folder)
    assert launch.end() == 0, launch.printed()
    launch.assert_nothing_is_left(SOON)
    assert launch.of(1, "lost")[0]["kind"] == kind
    assert launch.events("commit")[alone]["counted"] == [0]
    assert [event["life"] for event in launch.of(1, "started")] == ["1"]


@pytest.mark.long
def test_the_work_of_a_group_that_freezes_counts_when_it_is_back(launch: Launch) -> None:
    """Its log says so, and no work is lost before the run ends."""
    late = ("--method.late_rounds", "1000", "--method.outer", "{name='SGD', lr=0.7, momentum=0.9}")
    launch.start("--heartbeat-timeout", "60", *QUORUM, *late)
    frozen = launch.processes(1)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    launch.wait(lambda: bool(launch.of(1, "late")))
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    launch.wait(lambda: launch.returned(1))
    hurry(launch.folder)
    assert launch.end() == 0, launch.printed()
    launch.assert_nothing_is_left(SOON)
    after = launch.events("late", "generation", "commit", "lost")
    while "newcomers" not in (event := after.pop(0)) or event["newcomers"] != [1]:
        assert event["event"] != "lost"
    assert after[0]["counted"] == [0, 1]
    log = (replica_group_folder(launch.run, 1) / "output.log").read_text()
    assert f"synchronization {after[0]['rounds']} counts what this group learned since" in log


@pytest.mark.slow
def test_a_mistake_that_the_groups_see(launch: Launch) -> None:
    """The mistake is reported, and no folder is left that would hinder the next start."""
    programs.mpiexec()
    words = ["launch", "job.toml", "--run.output_dir", "run", *TWO, "--model.name", "net:Nett"]
    ended = programs.run([*HPCSGD, *words], cwd=launch.folder, timeout=PATIENCE, check=False)
    assert ended.returncode == 1, ended
    assert "no 'Nett' in net; did you mean 'Net'" in ended.stdout + ended.stderr
    assert not launch.run.exists()


@pytest.mark.long
def test_groups_start_from_weights_of_others(launch: Launch) -> None:
    """All groups read a file in the launcher's folder. A tiny learning rate keeps the weights."""
    programs.mpiexec()
    hurry(launch.folder)
    weights = {"inner.1.weight": torch.randn(10, 36), "inner.1.bias": torch.randn(10)}
    torch.save(weights, launch.folder / "there.pt")
    words = ("launch", "job.toml", *TWO, "--training.epochs", "1", "--optimizer.lr", "1e-30")
    done = launches.launch(launch.folder, *words, "--run.output_dir", "run", "--model.init_from", "there.pt")
    assert done.code == 0, done
    found = torch.load(launch.run / "model.pt")
    assert all(torch.equal(found[name], x) for name, x in weights.items())
    for replica_group in (0, 1):
        said = (replica_group_folder(launch.run, replica_group) / "output.log").read_text()
        assert f"the model starts from {launch.folder}/there.pt\n" in said

    done = launches.launch(launch.folder, *words, "--run.output_dir", "no", "--model.init_from", "nowhere.pt")
    assert done.code == 1
    assert f"job.toml: [model] init_from: {launch.folder}/nowhere.pt: no such file" in done.out + done.err
    assert "Traceback" not in done.out + done.err
    assert not (launch.folder / "no").exists()


def test_the_coordinator_gets_what_the_method_says_of_a_quorum(launch: Launch) -> None:
    job = launch.folder / "job.toml"
    words = ["--method.quorum", "2", "--method.grace_s", "1.5", "--method.late_rounds", "3"]
    config = load(job, [*words, "--method.outer", "{name='SGD', lr=0.7}"])
    enough = {"quorum": 2, "grace": 1.5, "late_rounds": 3}
    assert coordinator_arguments(job, config, 3) == {"budget": None, **enough}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*TWO, "--method.name", "hierarchical"], "job.toml: [method] name = hierarchical: elastic groups"),
        ([], "how many groups? give --groups, or groups in the [parallel] section"),
        ([*TWO, "--run.output_dir", "used"], "used: holds a run: pass --resume to go on with it, or choose"),
        (
            [*TWO, "--group-size", "9"],
            "job.toml:2: [data] group_batch_size = 8: too few samples for a group of 9",
        ),
        ([*TWO, "--srun=--mpi=pmi2"], "--srun --mpi=pmi2: not inside a Slurm job"),
        (
            [*TWO, "--method.quorum", "3", "--method.grace_s", "1"],
            "job.toml: [method]: quorum = 3: expected at most the number of groups, 2",
        ),
        (
            [*TWO, "--method.late_rounds", "2"],
            "job.toml: [method]: late_rounds: it needs quorum and grace_s as well",
        ),
        (
            [*TWO, *QUORUM, "--method.late_rounds", "2"],
            "job.toml: [method]: late_rounds: it needs outer as well; the outer optimizer SGD with lr = 1",
        ),
        ([*TWO, "--heartbeat-timeout", "0"], "--heartbeat-timeout 0: must be more than 0"),
        ([*TWO, "--training.epoch", "3"], "--training.epoch 3: unknown key: did you mean --training.epochs?"),
    ],
    ids=[
        "method",
        "groups",
        "folder",
        "batch",
        "srun",
        "quorum",
        "late",
        "plain",
        "heartbeat_timeout",
        "key",
    ],
)
def test_a_mistake_is_reported_in_one_line(launch: Launch, words: list[str], told: str) -> None:
    """The error comes before anything is started or written."""
    (launch.folder / "used").mkdir()
    (launch.folder / "used" / "metrics.jsonl").touch()
    before = sorted(launch.folder.rglob("*"))
    ended = launches.launch(launch.folder, "launch", "job.toml", "--run.output_dir", "run", *words)
    assert ended.code == 1, ended
    assert (ended.out, ended.err.count("\n")) == ("", 1), ended
    assert ended.err.startswith(f"hpcsgd: {told}")
    assert sorted(launch.folder.rglob("*")) == before
