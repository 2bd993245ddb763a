"""Tests of `hpcsgd launch` with groups that run a small script, and with real ones under mpiexec."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcsgd.cluster.launch.coordinator_process import CoordinatorProcess
from hpcsgd.cluster.launch.starter import Mpiexec, Srun, sizes, starter
from hpcsgd.cluster.launch.supervisor import Supervisor
from hpcsgd.elastic import event_log
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.elastic.resource_budget import ResourceBudget
from hpcsgd.errors import STOPPED, UserError
from pythons import python

GROUP = """
import sys, time
from pathlib import Path
from hpcsgd.elastic.join_info import join_info
from hpcsgd.elastic.register import Report
from hpcsgd.comm import threads
import torch

invited = join_info()
lives = Path(f"lives-{invited.replica_group}")
life = len(lives.read_text()) if lives.exists() else 0
lives.write_text("x" * (life + 1))

def rank(group):
    meetings = invited.accept(group)
    w = [torch.full((3,), float(invited.replica_group))]
    try:
        exec(sys.argv[1])
    finally:
        meetings.close()

from hpcsgd.elastic.endings import Over
try:
    threads.run(int(sys.argv[2]) if len(sys.argv) > 2 else 1, rank)
except Over:
    pass
"""
MEET = "for _ in range(5): meetings.mean(w)"


class Alone:
    """A launcher that starts one process for a group."""

    host = "127.0.0.1"
    ranks = 0

    def command(self, replica_group: int, K: int, program: Sequence[str]) -> list[str]:
        return list(program)


def supervise(
    folder: Path,
    replica_groups: int,
    body: str,
    restarts: int = 2,
    sizes: Sequence[int] = (),
    budget: ResourceBudget | None = None,
) -> int:
    script = folder / "group.py"
    script.write_text(GROUP)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        coordinator = CoordinatorProcess(
            replica_groups=replica_groups, token="secret", heartbeat_timeout=60, timeout=60,
            folder=str(folder),
            host="127.0.0.1", port=0, budget=None if budget is None else asdict(budget),
        )  # fmt: skip
        supervisor = Supervisor(
            dict(enumerate(sizes or [1] * replica_groups)), replica_groups, python(str(script), body), folder,
            Alone(), coordinator, restarts=restarts, heartbeat_timeout=60, timeout=60,
            moves_ranks=budget is not None and budget.resource == "ranks",
        )  # fmt: skip
        return asyncio.run(supervisor.run())


def lives(folder: Path, replica_group: int) -> int:
    return len((folder / f"lives-{replica_group}").read_text())


def events(folder: Path, kind: str) -> list[event_log.Event]:
    return [event for event in event_log.read(folder / "events.jsonl") if event["event"] == kind]


FINISH = f"""
{MEET}
if invited.replica_group == 0:
    meetings.finish()
else:
    meetings.mean(w)
"""


@pytest.mark.slow
def test_all_come_to_the_end(tmp_path: Path) -> None:
    assert supervise(tmp_path, 2, FINISH) == 0
    assert [lives(tmp_path, replica_group) for replica_group in (0, 1)] == [1, 1]
    assert len(events(tmp_path, "commit")) == 5
    assert [event["code"] for event in events(tmp_path, "ended")] == [0, 0]


class Over:
    """A coordinator elsewhere, whose groups finish while another one starts."""

    address = token = ""

    def __init__(self, started: Path) -> None:
        self._started, self._now = started, Register(phase=Phase.RUN)

    async def start(self) -> None: ...

    async def keep(self) -> None:
        while not self._started.exists():
            await asyncio.sleep(0.01)
        self._now = Register(phase=Phase.FINISHED)

    def note(self, event: str, **fields: Any) -> None: ...

    def register(self) -> Register:
        return self._now

    async def end(self) -> None: ...


@pytest.mark.parametrize("told", ["while it runs", "while it is being started"])
def test_who_comes_when_it_is_over_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    started = tmp_path / "started"
    over = Over(started)
    words = ["sh", "-c", f"touch {shlex.quote(str(started))}; exec sleep 1000"]
    supervisor = Supervisor(
        {1: 1}, 2, words, tmp_path, Alone(), over,
        restarts=2, heartbeat_timeout=60, timeout=60,
    )  # fmt: skip

    async def start(*command: str, **how: Any) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*command, **how)
        while over.register().phase is not Phase.FINISHED:
            await asyncio.sleep(0.01)
        return process

    if told == "while it is being started":
        slow = Namespace(asyncio, create_subprocess_exec=start)
        monkeypatch.setattr("hpcsgd.cluster.launch.supervisor.asyncio", slow)
    assert asyncio.run(supervisor.run()) == 0
    [replica_group] = supervisor.replica_groups
    assert (replica_group.lives, replica_group.code) == (1, 128 + signal.SIGKILL)


def test_who_is_being_started_is_asked_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = tmp_path / "ready"
    saves = f"trap 'exit {STOPPED}' USR1; touch {shlex.quote(str(ready))}; while :; do sleep 0.05; done"
    supervisor = Supervisor(
        {0: 1}, 1, ["sh", "-c", saves], tmp_path, Alone(), Over(tmp_path / "never"),
        restarts=2, heartbeat_timeout=60, timeout=60,
    )  # fmt: skip

    async def start(*command: str, **how: Any) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*command, **how)
        while not ready.exists():
            await asyncio.sleep(0.01)
        supervisor._stop()
        return process

    slow = Namespace(asyncio, create_subprocess_exec=start)
    monkeypatch.setattr("hpcsgd.cluster.launch.supervisor.asyncio", slow)
    assert asyncio.run(supervisor.run()) == STOPPED


def test_a_line_of_output_may_have_any_length(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A progress bar is one line, which returns to its beginning at each update."""
    program = ["sh", "-c", f"printf '%300000d\\rend' 0; exit {STOPPED}"]
    supervisor = Supervisor(
        {0: 1}, 1, program, tmp_path, Alone(), Over(tmp_path / "never"),
        restarts=2, heartbeat_timeout=60, timeout=60,
    )  # fmt: skip
    assert asyncio.run(supervisor.run()) == STOPPED
    written = (tmp_path / "replica_groups" / "0" / "output.log").read_bytes()
    assert (len(written), written[-5:]) == (300_004, b"0\rend")
    assert capfd.readouterr().out.endswith("end")


DIES = f"""
if invited.replica_group == 1 and life == 0:
    meetings.mean(w)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
while 1 not in meetings.members or lives.name != "lives-1" and len(Path("lives-1").read_text()) < 2:
    meetings.mean(w)
    time.sleep(0.1)
{FINISH}
"""


@pytest.mark.slow
def test_one_that_died_is_started_again_and_joins(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(tmp_path, 2, DIES) == 0
    assert [lives(tmp_path, replica_group) for replica_group in (0, 1)] == [1, 2]
    assert "hpcsgd: replica group 1 died with exit code 137" in capfd.readouterr().err
    assert events(tmp_path, "generation")[-1]["newcomers"] == [1]


DIES_AGAIN_AND_AGAIN = f"""
if invited.replica_group == 1 and life < 4:
    if {{meets}} or life == 0:
        while 1 not in meetings.counted:
            meetings.mean(w)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
meetings.mean(w)
while len(Path("lives-1").read_text()) < 5 or 1 not in meetings.members:
    meetings.mean(w)
    time.sleep(0.05)
{FINISH}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("meets", "pauses"), [(True, [1, 1, 1, 1]), (False, [1, 1, 2, 4])])
def test_it_is_waited_longer_only_where_lives_are_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meets: bool, pauses: list[int]
) -> None:
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr("hpcsgd.cluster.launch.supervisor.asyncio", Namespace(asyncio, sleep=sleep))
    body = DIES_AGAIN_AND_AGAIN.format(meets=meets)
    assert supervise(tmp_path, 2, body, restarts=4) == 0
    assert asked == pauses


class Namespace:
    """A module in which some attributes are replaced."""

    def __init__(self, module: ModuleType, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


KEEPS_DYING = """
if invited.replica_group == 1:
    meetings.mean(w)
    sys.exit(3)
meetings.mean(w)
for life in (1, 2):
    while 1 not in meetings.members or len(Path("lives-1").read_text()) < life:
        meetings.mean(w)
        time.sleep(0.1)
    while 1 in meetings.members:
        meetings.mean(w)
        time.sleep(0.1)
while Path("events.jsonl").read_text().count('"ended"') < 2:
    time.sleep(0.1)
time.sleep(1)
meetings.finish()
"""


@pytest.mark.slow
def test_one_that_keeps_dying_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(tmp_path, 2, KEEPS_DYING, restarts=1) == 0
    assert lives(tmp_path, 1) == 2
    assert "replica group 1 was started 2 times: the others go on without it" in capfd.readouterr().err


@pytest.mark.slow
def test_a_fault_of_the_job_ends_it_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(tmp_path, 2, "sys.exit('a key is wrong')") == 1
    assert lives(tmp_path, 0) == 1
    told = capfd.readouterr()
    assert "failed before the first synchronization and would fail again" in told.err
    assert "a key is wrong" in told.out


@pytest.mark.slow
def test_a_fault_that_only_a_silent_group_has_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "sys.exit('a file is missing') if invited.replica_group == 1 else time.sleep(60)"
    assert supervise(tmp_path, 2, body) == 1
    assert "a file is missing" in capfd.readouterr().err


@pytest.mark.slow
def test_all_that_had_to_stop_may_go_on(tmp_path: Path) -> None:
    body = (
        "meetings.report = Report(leaving=invited.replica_group == 1)\n"
        "meetings.mean(w)\nassert meetings.leaving\nsys.exit(75)"
    )
    assert supervise(tmp_path, 2, body) == 75
    assert [lives(tmp_path, replica_group) for replica_group in (0, 1)] == [1, 1]


@pytest.mark.slow
def test_zero_is_not_believed_without_the_register(tmp_path: Path) -> None:
    """`srun` returns 0 if a node was lost."""
    assert supervise(tmp_path, 1, "meetings.mean(w) if life else sys.exit(0)\nmeetings.finish()") == 0
    assert lives(tmp_path, 0) == 2


def test_a_group_that_cannot_be_started_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm's controller may restart just when a group has died. The other groups go on meanwhile."""

    class Busy(Alone):
        asked = 0

        def command(self, replica_group: int, K: int, program: Sequence[str]) -> list[str]:
            self.asked += 1
            if self.asked == 1:
                raise UserError("squeue: Unable to contact slurm controller")
            return list(program)

    supervisor = Supervisor(
        {0: 1}, 1, ["sh", "-c", f"exit {STOPPED}"], tmp_path, Busy(), Over(tmp_path / "never"),
        restarts=2, heartbeat_timeout=60, timeout=60,
    )  # fmt: skip
    monkeypatch.setattr("hpcsgd.cluster.launch.supervisor.PAUSE", 0.0)
    assert asyncio.run(supervisor.run()) == STOPPED
    assert "group 0 cannot be started: squeue: Unable to contact" in capfd.readouterr().err


def test_slurm_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 'error: Unable to contact slurm controller' >&2\nexit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UserError, match=r"squeue .*--jobs=7.*: error: Unable to contact slurm controller: "):
        Srun({"SLURM_NTASKS": "6", "SLURM_JOB_ID": "7"}, [])


def test_the_sizes_of_groups() -> None:
    assert sizes(3, 2, 0) == [2, 2, 2]
    assert sizes(2, None, 8) == [4, 4]
    assert sizes(2, None, 0) == [1, 1]
    for given, why in (
        ((None, 2, 4), "how many groups"),
        ((3, None, 4), "3 groups of 4 tasks"),
        ((3, 2, 4), "3 groups of 2 are more than the 4 tasks"),
    ):
        with pytest.raises(UserError, match=why):
            sizes(*given)


def test_how_a_group_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Mpiexec().command(0, 3, ["program"])[-3:] == ["-n", "3", "program"]
    nodes = ["node1", "node2", "node3"]
    monkeypatch.setattr(Srun, "_nodes", lambda _: list(nodes))
    environment = {"SLURM_NTASKS": "6", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "localhost"}
    by = Srun(environment, ["--mpi=pmi2"])
    first = [by.command(replica_group, 2, ["program"]) for replica_group in range(3)]
    assert first[0][:4] == ["srun", "--nodelist=node1", "--nodes=1", "--ntasks=2"]
    assert first[0][-3:] == ["--mpi=pmi2", "--exact", "program"]
    assert [words[1] for words in first[1:]] == ["--nodelist=node2", "--nodelist=node3"]
    assert by.command(1, 2, ["program"]) == first[1], "where it was"
    nodes.remove("node2")
    again = by.command(1, 2, ["program"])
    assert again[1] == "--nodelist=node1"
    assert again[-3:] == ["--overlap", "--cpu-bind=none", "program"]
    with pytest.raises(UserError, match="a group of 6 ranks needs 3 nodes, the job has 2"):
        by.command(1, 6, ["program"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="not inside a Slurm job"):
        starter(["--mpi=pmi2"], {})


MOVES = """
from hpcsgd.errors import MOVED
if life == 0:
    pace = 1.0 + 2 * invited.replica_group
    meetings.report = Report(step_seconds=pace)
    meetings.mean(w)
    meetings.report = Report(deal=(1, 0), step_seconds=pace)
    meetings.mean(w, 10)
    assert dict(meetings.after.units) == {0: 1, 1: 3}, meetings.after.units
    meetings.mean(w, 10)
    meetings.move()
    sys.exit(MOVED)
meetings.report = Report(deal=(1, 0))
meetings.mean(w, 10)
assert meetings.members == (0, 1)
if invited.replica_group == 0:
    meetings.finish()
else:
    meetings.mean(w, 10)
"""


@pytest.mark.slow
def test_groups_come_back_with_the_ranks_that_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They restart at once, and this does not count as a failure."""
    started: list[int] = []

    def command(_: Alone, replica_group: int, K: int, program: Sequence[str]) -> list[str]:
        started.append(K)
        return [*program, str(K)]

    monkeypatch.setattr(Alone, "command", command)
    budget = ResourceBudget("ranks", 1, min_gain=0.1, cost=0, epochs=9)
    assert supervise(tmp_path, 2, MOVES, restarts=0, sizes=[2, 2], budget=budget) == 0
    assert sorted(started) == [1, 2, 2, 3]
    assert not events(tmp_path, "lost")
