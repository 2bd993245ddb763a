"""The starts of a run as one timeline: the time, the steps and the end of each start.

``versions.json`` has the times of starts in UTC. ``run.log`` has later events, in the local time of its host.
Both files begin at the same time. So the difference of their first times is the offset of the time zone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcsgd.report.page.thinning import ThinnedCourse

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([A-Z]+) +(.*)")
BEGINNING = re.compile(r"\d+ groups? of \d+ ranks?, ")
BEFORE = re.compile(r"resuming with another configuration|\d+ ranks? by ")
"""Log lines that may precede the line `BEGINNING`. Every start writes `BEGINNING`."""
RESUMED = re.compile(r"resuming at step (\d+) ")
STEP = re.compile(r"\bstep (\d+)/\d+")
SAVED = re.compile("go on with --resume|the other replica groups go on")
DONE = re.compile(r"trained +([\d,]+) steps")
ZONE = timedelta(minutes=15)
"""The unit of the offsets of time zones."""
COMPLETE, STOPPED, OPEN = "complete", "saved, to go on", "no end on record"
TAIL, TROUBLES = 30, 30


@dataclass
class Attempt:
    """One start of a run: its times (UTC), its steps, and its end in words."""

    started: datetime
    about: Mapping[str, Any] = field(default_factory=dict)
    """The entry of this start in ``versions.json``."""
    last: datetime | None = None
    """Time of the last log line of this start."""
    first_step: int = 0
    last_step: int = 0
    end: str = OPEN
    course: ThinnedCourse = field(default_factory=ThinnedCourse)
    """The number of steps over time, in seconds since 1970."""

    @property
    def ended(self) -> datetime:
        return self.last or self.started


@dataclass
class AttemptTimeline:
    """All starts of a run, and the last lines (`tail`) and first warnings of its log."""

    attempts: list[Attempt]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))
    troubles: list[str] = field(default_factory=list)
    """The first warnings and errors."""

    @property
    def end(self) -> str:
        return self.attempts[-1].end if self.attempts else OPEN

    def redone(self) -> list[int]:
        """Return, for each start, the number of steps of the start before that it had to make again."""
        pairs = pairwise(self.attempts)
        again = [max(before.last_step - now.first_step, 0) for before, now in pairs]
        return [0, *again] if self.attempts else []


def timeline(starts: Sequence[Mapping[str, Any]], log: Path) -> AttemptTimeline:
    """Return the timeline from the entries of ``versions.json`` and ``run.log``; both may be missing."""
    timeline = AttemptTimeline(
        [Attempt(datetime.fromisoformat(s["started"]).astimezone(UTC), s) for s in starts]
    )
    ahead = None
    number, begun = -1, False
    for at, level, text in _lines(log, timeline.tail):
        if ahead is None:
            ahead = _hours(at, timeline.attempts[0].started) if timeline.attempts else timedelta()
        now = at - ahead
        if (before := BEFORE.match(text)) or BEGINNING.match(text):
            number += not begun
            begun = before is not None
        number = max(number, 0)
        if number == len(timeline.attempts):
            timeline.attempts.append(Attempt(now))
        if level not in ("INFO", "DEBUG") and len(timeline.troubles) < TROUBLES:
            timeline.troubles.append(f"{now:%Y-%m-%d %H:%M:%S} {level} {text}")
        _note(timeline.attempts[number], now, text)
    return timeline


def _note(attempt: Attempt, now: datetime, text: str) -> None:
    attempt.last = now
    if found := RESUMED.search(text):
        attempt.first_step = attempt.last_step = int(found[1])
    elif found := STEP.search(text):
        if not attempt.course.values:
            attempt.course.add(attempt.started.timestamp(), attempt.first_step)
        attempt.last_step = int(found[1])
        attempt.course.add(now.timestamp(), attempt.last_step)
    elif SAVED.search(text):
        attempt.end = STOPPED
    elif found := DONE.match(text):
        attempt.last_step = int(found[1].replace(",", ""))
        attempt.course.add(now.timestamp(), attempt.last_step)
        attempt.end = COMPLETE if attempt.end == OPEN else attempt.end


def _hours(local: datetime, utc: datetime) -> timedelta:
    return round((local - utc) / ZONE) * ZONE


def _lines(log: Path, tail: deque[str]) -> Iterator[tuple[datetime, str, str]]:
    """Yield time, level and text of each message, and add all lines of the log to `tail`."""
    if not log.exists():
        return
    with log.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            tail.append(line.rstrip("\n")[:500])
            if found := LINE.match(line):
                at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
                yield at + timedelta(milliseconds=int(found[2])), found[3], found[4]
