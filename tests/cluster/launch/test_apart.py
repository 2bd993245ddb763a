"""`hpcsgd launch --replica-group`: islands that are started one by one, and coordinators that move between
them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import programs
from cluster.launch.slow_runs import EPOCHS, at_work, hurry, is_of, prepare
from hpcsgd.cluster.launch.apart import _made_or_joined
from hpcsgd.cluster.launch.elected import Elected
from hpcsgd.cluster.launch.supervisor import Supervisor
from hpcsgd.config.schema import load
from hpcsgd.elastic import event_log
from hpcsgd.elastic.journal import FOLDER, Term, claim, last_claimed
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.elastic.whereabouts import Whereabouts, of_term
from hpcsgd.errors import UserError
from hpcsgd.report.run_folder import island_folder
from train import launches
from train.launches import HPCSGD

pytestmark = pytest.mark.timeout(1200)
PATIENCE = 400.0  # seconds; the machine may be busy


class Islands:
    """Launchers of one island each, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.launchers: dict[int, programs.Running] = {}
        """The last of each island."""
        self.all: list[programs.Running] = []

    def start(self, island: int, *options: str, ranks: int = 2, on: Sequence[str] = ()) -> None:
        """`on`: what takes a command to another host."""
        words = ["launch", "job.toml", "--groups", "3", "--replica-group", str(island)]
        words += ["--group-size", str(ranks), "--run.output_dir", str(self.run)]
        with self.printed_by(island).open("ab") as printed:
            self.launchers[island] = programs.start(
                [*on, *HPCSGD, *words, "--heartbeat-timeout", "20", *options],
                cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=printed, stderr=printed,
            )  # fmt: skip
        self.all.append(self.launchers[island])

    def printed_by(self, island: int) -> Path:
        return self.folder / f"printed-{island}"

    def told(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("printed-*")))

    def wait(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)

    def wait_for_a_round_of(self, *islands: int) -> None:
        """From now on."""
        before = len(self.events("commit"))
        self.wait(lambda: any(e["counted"] == list(islands) for e in self.events("commit")[before:]))

    def events(self, *kinds: str) -> list[event_log.Event]:
        return [event for event in event_log.of_run(self.run) if event["event"] in kinds]

    def ended(self, island: int) -> int:
        """Its exit code, once it has one."""
        self.wait(lambda: self.launchers[island].poll() is not None)
        return self.launchers[island].returncode

    def ranks_of(self, island: int) -> list[int]:
        return [pid for pid, env in at_work(self.folder).items() if is_of(island, env)]


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[Islands]:
    folder = tmp_path.resolve()
    prepare(folder)
    islands = Islands(folder)
    yield islands
    for pid in at_work(folder):  # of a test that failed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for launcher in islands.all:
        launcher.wait()


@pytest.mark.long
def test_they_come_and_go_and_the_coordinator_moves(islands: Islands) -> None:
    programs.mpiexec()
    islands.start(1)
    islands.wait_for_a_round_of(1)
    islands.start(0)
    islands.wait_for_a_round_of(0, 1)
    assert last_claimed(islands.run / FOLDER) == 1

    for pid in [islands.launchers[1].pid, *islands.ranks_of(1)]:  # as with its node
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    islands.wait_for_a_round_of(0)
    assert last_claimed(islands.run / FOLDER) == 2

    islands.start(2)
    islands.wait_for_a_round_of(0, 2)
    islands.launchers[0].send_signal(signal.SIGUSR1)
    assert islands.ended(0) == 75
    assert "SIGUSR1 received: left at step" in islands.told()
    islands.wait_for_a_round_of(2)
    assert last_claimed(islands.run / FOLDER) == 3

    islands.launchers[2].send_signal(signal.SIGUSR1)
    assert islands.ended(2) == 75
    saved = max(int(path.name.removeprefix("step-")) for path in islands.run.glob("checkpoints/step-*"))
    assert f"SIGUSR1 received: saved step {saved}, go on with --resume" in islands.told()
    assert not at_work(islands.folder)

    hurry(islands.folder)
    islands.start(0)
    assert islands.ended(0) == 0, islands.told()
    assert f"resuming at step {saved} " in islands.printed_by(0).read_text()
    assert [event["kind"] for event in islands.events("lost")] == ["died", "left", "left"]
    assert [event["epoch"] for event in islands.events("commit")][-1] == EPOCHS
    for name in ("model.pt", "summary.json", "curves.png"):
        assert (islands.run / name).exists(), name
    islands.start(1)
    assert islands.ended(1) == 0
    assert islands.printed_by(1).read_text().endswith(f"hpcsgd: {islands.run}: the training is complete\n")
    assert "Traceback" not in islands.told()


@pytest.mark.long
def test_launchers_that_are_killed_or_frozen(islands: Islands) -> None:
    """Ranks that live on give way to those of the next launcher; another one's coordinator is taken over."""
    programs.mpiexec()
    long = ("--training.epochs", "1000")
    for island in (0, 1):
        islands.start(island, *long)
        islands.wait_for_a_round_of(*range(island + 1))
    for island in (0, 1):
        before = islands.ranks_of(island)
        assert before
        islands.launchers[island].kill()
        islands.launchers[island].wait()
        islands.start(island, *long)
        islands.wait(lambda island=island, before=before: not set(before) & set(islands.ranks_of(island)))
        islands.wait_for_a_round_of(0, 1)
    terms = islands.run / FOLDER
    kept = [pid for pid, env in at_work(islands.folder).items() if "HPCSGD_ISLAND" not in env]
    for pid in kept:  # launchers, coordinator
        os.kill(pid, signal.SIGSTOP)
    term = last_claimed(terms)
    islands.start(2, *long)
    islands.wait_for_a_round_of(0, 1, 2)
    assert last_claimed(terms) > term
    for pid in kept:
        os.kill(pid, signal.SIGCONT)
    for launcher in islands.launchers.values():
        launcher.send_signal(signal.SIGUSR1)
    assert [islands.ended(island) for island in range(3)] == [75, 75, 75], islands.told()
    assert "Traceback" not in islands.told()
    assert not at_work(islands.folder)


def elected(folder: Path, island: int, silence: float = 60.0) -> Elected:
    island_folder(folder, island).mkdir(parents=True)
    (folder / FOLDER).mkdir(exist_ok=True)
    return Elected(folder, island, silence=silence, host="127.0.0.1", islands=2, timeout=60.0)


@pytest.mark.slow
def test_of_several_launchers_one_has_the_coordinator_until_it_leaves(tmp_path: Path) -> None:
    terms = tmp_path / FOLDER

    async def go() -> None:
        two = [elected(tmp_path, island) for island in (0, 1)]
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
        for island, told in enumerate([None, "127.0.0.1:1"]):  # where nobody is
            at = elected(tmp_path, island, silence=0.5)
            term = last_claimed(terms) + 1
            assert claim(terms, term)
            if told is not None:
                Whereabouts(told, "a token").publish(terms, term)
            await at.start()
            assert at.has_it
            assert last_claimed(terms) == term + 1
            await at.end()

    asyncio.run(asyncio.wait_for(go(), PATIENCE))
    told = "hpcsgd: nothing was heard of the coordinator {} for 0.5 s: the next one begins"
    assert capsys.readouterr().err.splitlines() == [told.format("number 1"), told.format("at 127.0.0.1:1")]


def test_after_the_end_of_the_training_nobody_waits_for_a_coordinator(tmp_path: Path) -> None:
    """It has ended between this launcher's first look and its second."""

    class Never:
        host, ranks = "127.0.0.1", 0

        def command(self, island: int, K: int, program: Sequence[str]) -> list[str]:
            raise AssertionError("there is nothing left to do")

    async def go() -> int:
        at = elected(tmp_path, 0)
        assert claim(tmp_path / FOLDER, 1)
        Term(tmp_path / FOLDER, 1).write(Register(1, 7, 7, Phase.FINISHED))
        Whereabouts("", "a token").publish(tmp_path / FOLDER, 1)
        options = {"restarts": 0, "silence": 60.0, "timeout": 60.0}
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

    with pytest.raises(UserError, match=f"{tmp_path}: somebody has removed it"):
        asyncio.run(go())


def test_another_job_file_after_all_have_found_the_first_one_at_fault(islands: Islands) -> None:
    def comes(lr: str) -> bool:
        words = ["--run.output_dir", str(islands.run), "--optimizer.lr", lr]
        path = islands.folder / "job.toml"
        return _made_or_joined(path, islands.run, load(path, words), 2, resume=False)

    terms = islands.run / FOLDER
    assert comes("0.1")
    with pytest.raises(UserError, match=r"train by another job file: optimizer\.lr 0\.1 → 0\.2"):
        comes("0.2")  # the first one is about to begin
    assert claim(terms, 1)
    Whereabouts("", "a token").publish(terms, 1)
    assert not comes("0.2")
    assert claim(terms, 2)
    with pytest.raises(UserError, match=r"optimizer\.lr 0\.2 → 0\.3"):
        comes("0.3")
    Term(terms, 2).write(Register(generation=1))
    Whereabouts("", "a token").publish(terms, 2)
    with pytest.raises(UserError, match=r"optimizer\.lr 0\.2 → 0\.3"):
        comes("0.3")


def told_by(islands: Islands, *words: str) -> str:
    ended = launches.launch(islands.folder, "launch", "job.toml", "--run.output_dir", "run", *words)
    assert ended.code == 1, ended
    assert (ended.out, ended.err.count("\n")) == ("", 1), ended
    return ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--replica-group", "2"], "--replica-group 2: of 2 groups, they are 0 to 1"),
        (["--host", "127.0.0.1"], "--host 127.0.0.1: only with --replica-group"),
        (["--replica-group", "0", "--host", "192.0.2.1"], "--host 192.0.2.1: nobody can listen there: "),
        (
            ["--replica-group", "0", "--rebalance.resource", "ranks"],
            "job.toml: [rebalance] resource = ranks: groups ",
        ),
        (
            ["--replica-group", "0", "--method.name", "hierarchical"],
            "job.toml: [method] name = hierarchical: groups ",
        ),
        (
            ["--replica-group", "0", "--run.output_dir", "used"],
            "used: holds a run: pass --resume to go on with it, or ",
        ),
    ],
    ids=["number", "host", "address", "ranks", "method", "folder"],
)
def test_a_mistake_is_told_in_one_line(islands: Islands, words: list[str], told: str) -> None:
    (islands.folder / "used").mkdir()
    (islands.folder / "used" / "metrics.jsonl").touch()
    before = sorted(islands.folder.rglob("*"))
    assert told_by(islands, "--groups", "2", *words).startswith(f"hpcsgd: {told}")
    assert sorted(islands.folder.rglob("*")) == before


@pytest.mark.slow
def test_a_mistake_that_all_find_at_once(islands: Islands) -> None:
    """As the tasks of an array do. Each tells it and ends; the next ones begin in the same folder."""
    programs.mpiexec()
    for island in range(3):
        islands.start(island, "--model.name", "net:Nett", ranks=1)
    for island in range(3):
        assert islands.ended(island) == 1
        assert "no 'Nett' in net; did you mean 'Net'" in islands.printed_by(island).read_text()
    assert "Traceback" not in islands.told()
    hurry(islands.folder)
    islands.start(0, ranks=1)
    assert islands.ended(0) == 0, islands.told()


@pytest.mark.slow
def test_islands_of_one_run_train_by_one_job_file(islands: Islands) -> None:
    """A mistake that its ranks see leaves no folder; other job files, or ways to start, are refused."""
    programs.mpiexec()
    islands.start(0, "--model.name", "net:Nett")
    assert islands.ended(0) == 1
    assert "no 'Nett' in net; did you mean 'Net'" in islands.told()
    assert not islands.run.exists()
    islands.start(0)
    islands.wait_for_a_round_of(0)
    told = told_by(islands, "--groups", "3", "--replica-group", "1", "--optimizer.lr", "0.2")
    assert (
        told
        == "hpcsgd: job.toml: the other groups of run train by another job file: optimizer.lr 0.1 → 0.2\n"
    )
    told = told_by(islands, "--groups", "3")
    assert told == (
        "hpcsgd: run: the groups of this run are started apart: give --replica-group, or another [run] "
        "output_dir\n"
    )
    islands.launchers[0].send_signal(signal.SIGINT)
    assert islands.ended(0) == 130
