"""The events and log lines about late groups: their work counts, or is lost before they are members again."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsgd.elastic.attempt import Outcome
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


WHY = "it did not arrive"
GO_ON = f"the other groups go on without this group: {WHY}"
IN_PARTS = "what this group learned in the parts of the model that the others synchronized without it"


def lines_of_late_work(caplog: pytest.LogCaptureFixture, parts: int, late_rounds: int, end: str) -> list[str]:
    """Return what a group with `parts` logs that was left out after its second synchronization.

    `end` says how its work ends: it "counts", is "lost", or the others have "finished".
    """
    caplog.set_level(logging.WARNING)
    work, learned = LateWork(0, 0), SimpleNamespace(norms=[1.0] * parts, late_rounds=late_rounds)
    added: Any = learned
    work.begin(added, 2)
    work.left_out(WHY)
    if end == "finished":
        work.finished()
    else:
        back = Member(0, ("",), 2, late=end == "counts")
        work.committed(replace(RUNNING, rounds=5, began=5, members=(back, Member(1, ("",), 5))))
    return caplog.messages


@pytest.mark.parametrize("end", ["counts", "lost", "finished"])
def test_what_a_group_loses_at_once_is_what_it_learned_since_the_round_or_in_parts(
    caplog: pytest.LogCaptureFixture, end: str
) -> None:
    in_parts = "it loses what it learned in the parts of the model that they synchronize without it"
    assert lines_of_late_work(caplog, 3, 0, end) == [f"{GO_ON}; {in_parts}"]
    caplog.clear()
    whole = f"the other groups go on without what this group learned since synchronization 2: {WHY}"
    assert lines_of_late_work(caplog, 1, 0, end) == [whole]


@pytest.mark.parametrize(
    ("end", "parts", "line"),
    [
        ("counts", 3, "what this group learned counts from synchronization 6 on, part by part"),
        ("counts", 1, "synchronization 6 counts what this group learned since synchronization 2"),
        ("lost", 3, f"{IN_PARTS} is lost: this group missed 3 synchronizations"),
        (
            "lost",
            1,
            "what this group learned since synchronization 2 is lost: this group missed 3 synchroniz",
        ),
        (
            "finished",
            3,
            "what this group learned since the last synchronization of each part is lost: the o",
        ),
        ("finished", 1, "what this group learned since synchronization 2 is lost: the others have finished"),
    ],
)
def test_what_becomes_of_late_work(caplog: pytest.LogCaptureFixture, end: str, parts: int, line: str) -> None:
    left_out, ended = lines_of_late_work(caplog, parts, 2, end)
    since = "the last synchronization of each part" if parts > 1 else "synchronization 2"
    most = "counts later if it misses at most 2 synchronizations"
    assert left_out == f"{GO_ON}; what it learned since {since} {most}"
    assert ended.startswith(line)


def test_parts_that_may_have_counted_do_not_count_again(caplog: pytest.LogCaptureFixture) -> None:
    work = LateWork(0, 0)
    added: Any = SimpleNamespace(norms=[1.0, 1.0], late_rounds=2)
    work.begin(added, 2)
    work.failed([Outcome(is_unknown=True)])
    back = (Member(0, ("",), 2), Member(1, ("",), 3))
    work.committed(replace(RUNNING, rounds=3, began=3, members=back))
    assert caplog.messages == [f"the other groups may have counted {IN_PARTS}, so it does not count again"]
