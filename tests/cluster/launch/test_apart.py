"""Tests of `hpcsgd launch --replica-group`: groups that are started one by one, and moving coordinators."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import pytest

import programs
from cluster.launch.slow_runs import EPOCHS, at_work, hurry, is_of, prepare
from hpcsgd.cluster.launch.elected import CoordinatorElection
from hpcsgd.cluster.launch.replica_group import _made_or_joined
from hpcsgd.cluster.launch.supervisor import Supervisor
from hpcsgd.config.schema import load
from hpcsgd.elastic import event_log
from hpcsgd.elastic.coordinator_address import CoordinatorAddress, of_term
from hpcsgd.elastic.journal import FOLDER, TermJournal, claim, last_claimed
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.errors import UserError
from hpcsgd.report.run_folder import replica_group_folder
from train import launches
from train.launches import HPCSGD

pytestmark = pytest.mark.timeout(1200)
PATIENCE = 400.0  # seconds; the machine may be busy


class Groups:
    """Launchers of one group each, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.launchers: dict[int, programs.Running] = {}
        """The latest launcher of each group."""
        self.all: list[programs.Running] = []

    def start(self, replica_group: int, *options: str, ranks: int = 2, on: Sequence[str] = ()) -> None:
        """Start a launcher; `on` is a command that runs it on another host."""
        words = ["launch", "job.toml", "--groups", "3", "--replica-group", str(replica_group)]
        words += ["--group-size", str(ranks), "--run.output_dir", str(self.run)]
        with self.printed_by(replica_group).open("ab") as printed:
            self.launchers[replica_group] = programs.start(
                [*on, *HPCSGD, *words, "--heartbeat-timeout", "20", *options],
                cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=printed, stderr=printed,
            )  # fmt: skip
        self.all.append(self.launchers[replica_group])

    def printed_by(self, replica_group: int) -> Path:
        return self.folder / f"printed-{replica_group}"

    def told(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("printed-*")))

    def wait(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)

    def wait_for_a_round_of(self, *replica_groups: int) -> None:
        """Wait for a new round of exactly these groups."""
        before = len(self.events("commit"))
        self.wait(lambda: any(e["counted"] == list(replica_groups) for e in self.events("commit")[before:]))

    def events(self, *kinds: str) -> list[event_log.Event]:
        return [event for event in event_log.of_run(self.run) if event["event"] in kinds]

    def ended(self, replica_group: int) -> int:
        """Wait for the end of the group's launcher and return its exit code."""
        self.wait(lambda: self.launchers[replica_group].poll() is not None)
        return self.launchers[replica_group].returncode

    def ranks_of(self, replica_group: int) -> list[int]:
        return [pid for pid, env in at_work(self.folder).items() if is_of(replica_group, env)]


@pytest.fixture
def replica_groups(tmp_path: Path) -> Iterator[Groups]:
    folder = tmp_path.resolve()
    prepare(folder)
    replica_groups = Groups(folder)
    yield replica_groups
    for pid in at_work(folder):  # processes that a failed test has left
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for launcher in replica_groups.all:
        launcher.wait()


@pytest.mark.long
def test_they_come_and_go_and_the_coordinator_moves(replica_groups: Groups) -> None:
    programs.mpiexec()
    replica_groups.start(1)
    replica_groups.wait_for_a_round_of(1)
    replica_groups.start(0)
    replica_groups.wait_for_a_round_of(0, 1)
    assert last_claimed(replica_groups.run / FOLDER) == 1

    for pid in [replica_groups.launchers[1].pid, *replica_groups.ranks_of(1)]:  # as if its node had failed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    replica_groups.wait_for_a_round_of(0)
    assert last_claimed(replica_groups.run / FOLDER) == 2

    replica_groups.start(2)
    replica_groups.wait_for_a_round_of(0, 2)
    replica_groups.launchers[0].send_signal(signal.SIGUSR1)
    assert replica_groups.ended(0) == 75
    assert "SIGUSR1 received: left at step" in replica_groups.told()
    replica_groups.wait_for_a_round_of(2)
    assert last_claimed(replica_groups.run / FOLDER) == 3

    replica_groups.launchers[2].send_signal(signal.SIGUSR1)
    assert replica_groups.ended(2) == 75
    saved = max(
        int(path.name.removeprefix("step-")) for path in replica_groups.run.glob("checkpoints/step-*")
    )
    assert f"SIGUSR1 received: saved step {saved}, go on with --resume" in replica_groups.told()
    assert not at_work(replica_groups.folder)

    hurry(replica_groups.folder)
    replica_groups.start(0)
    assert replica_groups.ended(0) == 0, replica_groups.told()
    assert f"resuming at step {saved} " in replica_groups.printed_by(0).read_text()
    lost = [(event["kind"], event["replica_group"]) for event in replica_groups.events("lost")]
    # the first coordinator may report group 1, too, if it is lost a moment later than the group's ranks
    assert [each for each, _ in groupby(lost)] == [("died", 1), ("left", 0), ("left", 2)]
    assert [event["epoch"] for event in replica_groups.events("commit")][-1] == EPOCHS
    for name in ("model.pt", "summary.json", "curves.png"):
        assert (replica_groups.run / name).exists(), name
    replica_groups.start(1)
    assert replica_groups.ended(1) == 0
    assert (
        replica_groups.printed_by(1)
        .read_text()
        .endswith(f"hpcsgd: {replica_groups.run}: the training is complete\n")
    )
    assert "Traceback" not in replica_groups.told()


@pytest.mark.long
def test_launchers_that_are_killed_or_frozen(replica_groups: Groups) -> None:
    """Surviving ranks end for those of the next launcher; another launcher replaces a lost coordinator."""
    programs.mpiexec()
    long = ("--training.epochs", "1000")
    for replica_group in (0, 1):
        replica_groups.start(replica_group, *long)
        replica_groups.wait_for_a_round_of(*range(replica_group + 1))
    for replica_group in (0, 1):
        before = replica_groups.ranks_of(replica_group)
        assert before
        replica_groups.launchers[replica_group].kill()
        replica_groups.launchers[replica_group].wait()
        replica_groups.start(replica_group, *long)
        replica_groups.wait(
            lambda replica_group=replica_group, before=before: (
                not set(before) & set(replica_groups.ranks_of(replica_group))
            )
        )
        replica_groups.wait_for_a_round_of(0, 1)
    terms = replica_groups.run / FOLDER
    kept = [pid for pid, env in at_work(replica_groups.folder).items() if "HPCSGD_REPLICA_GROUP" not in env]
    for pid in kept:  # the launchers and the coordinator
        os.kill(pid, signal.SIGSTOP)
    term = last_claimed(terms)
    replica_groups.start(2, *long)
    replica_groups.wait_for_a_round_of(0, 1, 2)
    assert last_claimed(terms) > term
    for pid in kept:
        os.kill(pid, signal.SIGCONT)
    for launcher in replica_groups.launchers.values():
        launcher.send_signal(signal.SIGUSR1)
    assert [replica_groups.ended(replica_group) for replica_group in range(3)] == [75, 75, 75], (
        replica_groups.told()
    )
    assert "Traceback" not in replica_groups.told()
    assert not at_work(replica_groups.folder)


def elected(folder: Path, replica_group: int, heartbeat_timeout: float = 60.0) -> CoordinatorElection:
    replica_group_folder(folder, replica_group).mkdir(parents=True)
    (folder / FOLDER).mkdir(exist_ok=True)
    return CoordinatorElection(
        folder,
        replica_group,
        heartbeat_timeout=heartbeat_timeout,
        host="127.0.0.1",
        replica_groups=2,
        timeout=60.0,
    )


@pytest.mark.long
def test_of_several_launchers_one_has_the_coordinator_until_it_leaves(tmp_path: Path) -> None:
    terms = tmp_path / FOLDER

    async def go() -> None:
        two = [elected(tmp_path, replica_group) for replica_group in (0, 1)]
        await asyncio.wait_for(asyncio.gather(*(each.start() for each in two)), PATIENCE)
        assert last_claimed(terms) == 1
        first = of_term(terms, 1)
        assert first is not None
        assert two[0].token == two[1].token == first.token
        keeping = [asyncio.create_task(each.keep()) for each in two]
        with_it = 0 if two[0].has_it else 1
        keeping[with_it].cancel()
        await two[with_it].end()
        while last_claimed(terms) < 2 or of_term(terms, 2) is None:
            await asyncio.sleep(0.05)
        second = of_term(terms, 2)
        assert second is not None
        assert (second.address != first.address, second.token) == (True, first.token)
        keeping[1 - with_it].cancel()
        await two[1 - with_it].end()
        left = of_term(terms, 2)
        assert left is not None
        assert left.address == ""

    asyncio.run(asyncio.wait_for(go(), PATIENCE))


@pytest.mark.slow
def test_the_next_one_is_begun_where_one_has_died_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def go() -> None:
        terms = tmp_path / FOLDER
        for replica_group, told in enumerate([None, "127.0.0.1:1"]):  # an address without a listener
            at = elected(tmp_path, replica_group, heartbeat_timeout=0.5)
            term = last_claimed(terms) + 1
            assert claim(terms, term)
            if told is not None:
                CoordinatorAddress(told, "a token").publish(terms, term)
            await at.start()
            assert at.has_it
            assert last_claimed(terms) == term + 1
            await at.end()

    asyncio.run(asyncio.wait_for(go(), PATIENCE))
    told = "hpcsgd: nothing was heard of the coordinator {} for 0.5 s: the next one begins"
    assert capsys.readouterr().err.splitlines() == [told.format("number 1"), told.format("at 127.0.0.1:1")]


def test_after_the_end_of_the_training_nobody_waits_for_a_coordinator(tmp_path: Path) -> None:
    """The training has ended between this launcher's first and second look."""

    class Never:
        host, ranks = "127.0.0.1", 0

        def command(self, replica_group: int, K: int, program: Sequence[str]) -> list[str]:
            raise AssertionError("there is nothing left to do")

    async def go() -> int:
        at = elected(tmp_path, 0)
        assert claim(tmp_path / FOLDER, 1)
        TermJournal(tmp_path / FOLDER, 1).write(Register(1, 7, 7, Phase.FINISHED))
        CoordinatorAddress("", "a token").publish(tmp_path / FOLDER, 1)
        options = {"restarts": 0, "heartbeat_timeout": 60.0, "timeout": 60.0}
        return await Supervisor({0: 1}, 2, [], tmp_path, Never(), at, **options).run()

    assert asyncio.run(asyncio.wait_for(go(), PATIENCE)) == 0
    assert last_claimed(tmp_path / FOLDER) == 1


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    async def go() -> None:
        at = elected(tmp_path, 0)
        (tmp_path / FOLDER).rmdir()
        try:
            await at.start()
        finally:
            await at.end()

    with pytest.raises(UserError, match=f"{tmp_path}: it has been removed"):
        asyncio.run(go())


def test_groups_with_and_without_fsdp_are_of_two_runs(replica_groups: Groups) -> None:
    """They may differ in size and in what connects their ranks."""
    path = replica_groups.folder / "job.toml"

    def comes(*words: str) -> bool:
        config = load(path, ["--run.output_dir", str(replica_groups.run), *words])
        return _made_or_joined(path, replica_groups.run, config, 2, resume=False)

    assert comes("--parallel.groups", "2")
    assert not comes("--parallel.group_size", "3", "--parallel.timeout_s", "60", "--parallel.backend", "mpi")
    assert not comes("--parallel.device_backend.inter_group", "nccl")
    with pytest.raises(UserError, match=r"train by another job file: parallel\.fsdp (None|False) → True"):
        comes("--parallel.fsdp", "true")


def test_another_job_file_after_all_have_found_the_first_one_at_fault(replica_groups: Groups) -> None:
    def comes(lr: str) -> bool:
        words = ["--run.output_dir", str(replica_groups.run), "--optimizer.lr", lr]
        path = replica_groups.folder / "job.toml"
        return _made_or_joined(path, replica_groups.run, load(path, words), 2, resume=False)

    terms = replica_groups.run / FOLDER
    assert comes("0.1")
    with pytest.raises(UserError, match=r"train by another job file: optimizer\.lr 0\.1 → 0\.2"):
        comes("0.2")  # the first one is about to begin
    assert claim(terms, 1)
    CoordinatorAddress("", "a token").publish(terms, 1)
    assert not comes("0.2")
    assert claim(terms, 2)
    with pytest.raises(UserError, match=r"optimizer\.lr 0\.2 → 0\.3"):
        comes("0.3")
    TermJournal(terms, 2).write(Register(generation=1))
    CoordinatorAddress("", "a token").publish(terms, 2)
    with pytest.raises(UserError, match=r"optimizer\.lr 0\.2 → 0\.3"):
        comes("0.3")


def told_by(replica_groups: Groups, *words: str) -> str:
    ended = launches.launch(replica_groups.folder, "launch", "job.toml", "--run.output_dir", "run", *words)
    assert ended.code == 1, ended
    assert (ended.out, ended.err.count("\n")) == ("", 1), ended
    return ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--replica-group", "2"], "--replica-group 2: of 2 groups, they are 0 to 1"),
        (["--host", "127.0.0.1"], "--host 127.0.0.1: only with --replica-group"),
        (["--replica-group", "0", "--host", "192.0.2.1"], "--host 192.0.2.1: cannot listen there: "),
        (
            ["--replica-group", "0", "--rebalance.resource", "ranks"],
            "job.toml: [rebalance] resource = ranks: separately ",
        ),
        (
            ["--replica-group", "0", "--method.name", "hierarchical"],
            "job.toml: [method] name = hierarchical: elastic ",
        ),
        (
            ["--replica-group", "0", "--run.output_dir", "used"],
            "used: holds a run: pass --resume to go on with it, or ",
        ),
    ],
    ids=["number", "host", "address", "ranks", "method", "folder"],
)
def test_a_mistake_is_reported_in_one_line(replica_groups: Groups, words: list[str], told: str) -> None:
    (replica_groups.folder / "used").mkdir()
    (replica_groups.folder / "used" / "metrics.jsonl").touch()
    before = sorted(replica_groups.folder.rglob("*"))
    assert told_by(replica_groups, "--groups", "2", *words).startswith(f"hpcsgd: {told}")
    assert sorted(replica_groups.folder.rglob("*")) == before


@pytest.mark.long
def test_a_mistake_that_all_find_at_once(replica_groups: Groups) -> None:
    """The groups start like tasks of an array. Each reports the mistake. Later ones use the same folder."""
    programs.mpiexec()
    for replica_group in range(3):
        replica_groups.start(replica_group, "--model.name", "net:Nett", ranks=1)
    for replica_group in range(3):
        assert replica_groups.ended(replica_group) == 1
        assert "no 'Nett' in net; did you mean 'Net'" in replica_groups.printed_by(replica_group).read_text()
    assert "Traceback" not in replica_groups.told()
    hurry(replica_groups.folder)
    replica_groups.start(0, ranks=1)
    assert replica_groups.ended(0) == 0, replica_groups.told()


@pytest.mark.slow
def test_groups_of_one_run_train_by_one_job_file(replica_groups: Groups) -> None:
    """A mistake that the ranks see leaves no folder. Groups with other job files or options are refused."""
    programs.mpiexec()
    replica_groups.start(0, "--model.name", "net:Nett")
    assert replica_groups.ended(0) == 1
    assert "no 'Nett' in net; did you mean 'Net'" in replica_groups.told()
    assert not replica_groups.run.exists()
    replica_groups.start(0)
    replica_groups.wait_for_a_round_of(0)
    told = told_by(replica_groups, "--groups", "3", "--replica-group", "1", "--optimizer.lr", "0.2")
    assert (
        told
        == "hpcsgd: job.toml: the other groups of run train by another job file: optimizer.lr 0.1 → 0.2\n"
    )
    told = told_by(replica_groups, "--groups", "3")
    assert told == (
        "hpcsgd: run: the groups of this run start separately: give --replica-group, or another [run] "
        "output_dir\n"
    )
    replica_groups.launchers[0].send_signal(signal.SIGINT)
    assert replica_groups.ended(0) == 130
