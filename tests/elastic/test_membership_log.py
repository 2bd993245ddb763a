"""The events and log lines about late groups: their work counts, or is lost before they are members again."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcsgd.elastic.event_log import EventLog, Loss, read
from hpcsgd.elastic.late_work import LateWork
from hpcsgd.elastic.membership_log import MembershipLog
from hpcsgd.elastic.register import Member, Phase, Register

RUNNING = Register(
    phase=Phase.RUN, generation=1, rounds=1, members=tuple(Member(g, ("",), 0) for g in (0, 1, 2))
)


def next_generation(before: Register, *members: Member) -> Register:
    return replace(before, generation=before.generation + 1, began=before.rounds, members=members)


def up_to_date(register: Register, *replica_groups: int) -> tuple[Member, ...]:
    return tuple(Member(g, ("",), register.rounds) for g in replica_groups)


def told(folder: Path, *registers: Register) -> list[str]:
    """Return the events of a run in which group 0 is late in the first of the registers."""
    with EventLog(folder / "events.jsonl") as events:
        membership_log = MembershipLog(events, late_rounds=2)
        membership_log.lose(registers[0], 0, Loss.LATE, "it did not arrive")
        for before, now in itertools.pairwise(registers):
            membership_log.note(before, now)
    return [event["event"] for event in read(folder / "events.jsonl")]


def test_work_that_counts_in_the_failed_round_done_again_is_not_lost(tmp_path: Path) -> None:
    """The others begin the round for which the group was late again, now with it: it has missed none."""
    again = next_generation(RUNNING, *up_to_date(RUNNING, 0, 1, 2))
    registers = [replace(again, rounds=rounds) for rounds in (1, 2, 3, 4, 5)]
    assert told(tmp_path, RUNNING, *registers) == ["late", "generation", *["commit"] * 4]


def test_work_that_is_brought_late_is_not_lost(tmp_path: Path) -> None:
    without = next_generation(RUNNING, *up_to_date(RUNNING, 1, 2))
    missed = replace(without, rounds=2)
    back = next_generation(missed, Member(0, ("",), 1, late=True), *up_to_date(missed, 1, 2))
    events = told(tmp_path, RUNNING, without, missed, back, replace(back, rounds=3))
    assert events == ["late", "generation", "commit", "generation", "commit"]


def test_who_brings_nothing_has_lost_it_before_it_is_a_member_again(tmp_path: Path) -> None:
    without = next_generation(RUNNING, *up_to_date(RUNNING, 1, 2))
    missed = replace(without, rounds=2)
    back = next_generation(missed, Member(0, ("",), 1), *up_to_date(missed, 1, 2))
    events = told(tmp_path, RUNNING, without, missed, back, replace(back, rounds=3))
    assert events == ["late", "generation", "commit", "lost", "generation", "commit"]


def test_work_of_who_is_away_for_too_long_is_lost(tmp_path: Path) -> None:
    without = next_generation(RUNNING, *up_to_date(RUNNING, 1, 2))
    registers = [replace(without, rounds=rounds) for rounds in (1, 2, 3, 4)]
    assert told(tmp_path, RUNNING, *registers) == ["late", "generation", "commit", "commit", "commit", "lost"]


@pytest.mark.parametrize("counting", [True, False])
def test_a_group_that_was_left_out_and_missed_no_round_reads_that_its_work_counts(
    caplog: pytest.LogCaptureFixture, counting: bool
) -> None:
    caplog.set_level(logging.WARNING)
    work = LateWork(0, 0)
    learned = SimpleNamespace(norms=[1.0], late_rounds=2)
    work.begin(learned, 1)  # type: ignore[arg-type]
    if counting:
        work.left_out("it did not arrive")
    for rounds in (1, 2):  # the line comes once
        work.committed(replace(RUNNING, rounds=rounds, members=up_to_date(RUNNING, 0, 1)))
        work.begin(learned, rounds + 1)  # type: ignore[arg-type]
    lines = [line for line in caplog.messages if line.startswith("synchronization")]
    assert lines == ["synchronization 2 counts what this group learned since synchronization 1"] * counting
