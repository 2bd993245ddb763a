"""Tests of how a launcher reacts when a group's processes end; the test acts as the coordinator."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsgd.cluster.launch.supervisor import Supervisor
from hpcsgd.elastic import event_log
from hpcsgd.elastic.event_log import EventLog
from hpcsgd.elastic.register import Phase, Register
from hpcsgd.errors import MOVED, STOPPED

KILLED = 128 + signal.SIGKILL


@dataclass
class Life:
    """One start of a group: what happens, and how it ends."""

    end: str
    """A command line for a shell."""
    synchronizes: bool = False
    now: Mapping[str, Any] = field(default_factory=dict)
    """The changes of the membership by then."""


@dataclass
class Group:
    """The starter of one group, and a stand-in for the coordinator."""

    folder: Path
    lives: Sequence[Life]
    now: Register = field(default_factory=lambda: Register(phase=Phase.RUN, rounds=1))
    started: list[int] = field(default_factory=list)
    """The number of ranks of each start."""
    noted: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    address = token = ""
    host, ranks = "127.0.0.1", 0

    def command(self, replica_group: int, K: int, program: Sequence[str]) -> list[str]:
        life = self.lives[len(self.started)]
        self.started.append(K)
        if life.synchronizes:
            self.now = replace(self.now, rounds=self.now.rounds + 1)
            with EventLog(self.folder / event_log.NAME) as events:
                who = {"members": [0, replica_group], "counted": [0, replica_group]}
                events.commit(generation=1, rounds=self.now.rounds, **who, t=1, epoch=0, fraction=0.5)
        self.now = replace(self.now, **life.now)
        return ["sh", "-c", life.end]

    async def start(self) -> None: ...

    async def keep(self) -> None:
        await asyncio.Event().wait()

    def note(self, event: str, **fields: Any) -> None:
        self.noted.append((event, fields))

    def register(self) -> Register:
        return self.now

    async def end(self) -> None: ...


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the pauses in seconds before restarts."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    replaced = SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    monkeypatch.setattr("hpcsgd.cluster.launch.supervisor.asyncio", replaced)
    return found


def supervised(replica_group: Group, restarts: int, *, moves_ranks: bool = False) -> int:
    supervisor = Supervisor(
        {1: 2}, 2, [], replica_group.folder, replica_group, replica_group,
        restarts=restarts, heartbeat_timeout=60, timeout=60, moves_ranks=moves_ranks,
    )  # fmt: skip
    return asyncio.run(supervisor.run())


def test_it_is_waited_longer_where_lives_are_in_vain(tmp_path: Path, pauses: list[float]) -> None:
    synced, vain, stop = Life("kill -9 $$", synchronizes=True), Life("exit 3"), Life(f"exit {STOPPED}")
    replica_group = Group(tmp_path, [vain, vain, vain, synced, vain, synced, stop])
    assert supervised(replica_group, restarts=6) == STOPPED
    assert pauses == [1, 2, 4, 1, 1, 1]
    codes = [fields["code"] for event, fields in replica_group.noted if event == "ended"]
    assert codes == [3, 3, 3, KILLED, 3, KILLED, STOPPED]


def test_who_moves_comes_back_at_once_and_has_not_died(
    tmp_path: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    moves = Life(f"exit {MOVED}", now={"units": ((0, 1), (1, 3))})
    replica_group = Group(tmp_path, [moves, Life(f"exit {STOPPED}")])
    assert supervised(replica_group, restarts=0, moves_ranks=True) == STOPPED
    assert (replica_group.started, pauses) == ([2, 3], [])
    assert capsys.readouterr().err == ""


def test_units_that_are_no_ranks_leave_these_as_they_are(tmp_path: Path) -> None:
    moves = Life(f"exit {MOVED}", now={"units": ((0, 128), (1, 256))})
    replica_group = Group(tmp_path, [moves, Life(f"exit {STOPPED}")])
    assert supervised(replica_group, restarts=0) == STOPPED
    assert replica_group.started == [2, 2]


def test_it_is_given_up_after_so_many_lives(
    tmp_path: Path, pauses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 counts as a failure if the membership does not say that the training is complete."""
    replica_group = Group(tmp_path, [Life("exit 0"), Life("exit 3")])
    assert supervised(replica_group, restarts=1) == 3
    assert pauses == [1]
    assert capsys.readouterr().err.splitlines() == [
        "hpcsgd: replica group 1 died with exit code 0",
        "hpcsgd: replica group 1 died with exit code 3",
        "hpcsgd: replica group 1 was started 2 times: the others go on without it",
    ]


@pytest.mark.parametrize(
    ("end", "rounds", "fault"), [("exit 1", 0, True), ("exit 1", 1, False), ("exit 2", 0, False)]
)
def test_only_who_fails_before_any_synchronization_would_fail_again(
    tmp_path: Path, pauses: list[float], capfd: pytest.CaptureFixture[str], end: str, rounds: int, fault: bool
) -> None:
    first = Life(f"echo a file is missing; {end}", now={"rounds": rounds})
    replica_group = Group(tmp_path, [first, Life(f"exit {STOPPED}")], Register(phase=Phase.RUN))
    assert supervised(replica_group, restarts=1) == (1 if fault else STOPPED)
    assert len(replica_group.started) == (1 if fault else 2)
    told = capfd.readouterr()
    assert told.out == "a file is missing\n"
    assert ("the run ends" in told.err) == fault


def test_when_the_training_is_complete_codes_say_nothing(tmp_path: Path) -> None:
    replica_group = Group(tmp_path, [Life("exit 1", now={"phase": Phase.FINISHED})])
    assert supervised(replica_group, restarts=3) == 0
    assert supervised(replica_group, restarts=3) == 0
    assert len(replica_group.started) == 1, "the second time there was nothing left to do"


def test_who_has_to_leave_with_all_others_has_stopped(tmp_path: Path) -> None:
    replica_group = Group(tmp_path, [Life("exit 0", now={"leaving": True})])
    assert supervised(replica_group, restarts=3) == STOPPED
