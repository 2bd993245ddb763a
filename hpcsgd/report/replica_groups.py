"""What an event log tells of a run of islands: who was a member when, how far, and with what units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcsgd.elastic.event_log import Event, Loss

RETURNED = "returned"
Point = tuple[float, float]
"""Seconds and epochs."""


@dataclass
class Timeline:
    """The lines and marks of the islands; islands and kinds are in the order in which they came up."""

    lines: dict[int, list[list[Point]]] = field(default_factory=lambda: defaultdict(list))
    """Of each island, one for each time that it was a member."""
    marks: dict[str, list[tuple[int, Point]]] = field(default_factory=lambda: defaultdict(list))
    """By kind of loss or `RETURNED`: the island, and where its line ends or begins."""
    units: dict[str, list[tuple[float, Mapping[int, int]]]] = field(default_factory=lambda: defaultdict(list))
    """By unit: when it was given out, and what each island has from then on."""
    end: float = 0.0
    """Seconds."""

    @property
    def replica_groups(self) -> list[int]:
        had = (
            replica_group for steps in self.units.values() for _, units in steps for replica_group in units
        )
        return sorted({*self.lines, *had})

    @property
    def progress(self) -> list[Point]:
        """That of the members, who all have the same: it is that of the last committed round."""
        return sorted({point for lives in self.lines.values() for life in lives for point in life})


def tell(events: Sequence[Event]) -> Timeline:
    """The lines of all islands, from who was a member when and what was committed."""
    timeline = Timeline(end=max((event["at"] for event in events), default=0.0))
    members: set[int] = set()
    lost: set[int] = set()
    epochs = 0.0
    for event in events:
        at: float = event["at"]
        here = at, epochs
        match event["event"]:
            case "generation" | "commit":
                came = set(event["members"]) - members
                under_way = bool(members)
                for replica_group in sorted(came):
                    timeline.lines[replica_group].append([here])
                    if under_way or replica_group in lost:
                        timeline.marks[RETURNED].append((replica_group, here))
                _leave(timeline, members - set(event["members"]), here)
                members = set(event["members"])
                if event["event"] == "commit":
                    epochs = event["epoch"] + event["fraction"]
                    for replica_group in members:
                        timeline.lines[replica_group][-1].append((at, epochs))
            case "lost":
                replica_group = event["replica_group"]
                if replica_group in members:
                    _leave(timeline, {replica_group}, here)
                    timeline.marks[event["kind"]].append((replica_group, here))
                members.discard(replica_group)
                lost.add(replica_group)
            case "units":
                timeline.units[event["unit"]].append((at, event["units"]))
            case "finished" | "stopped":
                _leave(timeline, members, here)
                members.clear()
                lost.clear()
    _leave(timeline, members, (timeline.end, epochs))
    return timeline


def _leave(timeline: Timeline, replica_groups: set[int], here: Point) -> None:
    """Their lines end here."""
    for replica_group in replica_groups:
        timeline.lines[replica_group][-1].append(here)


def numbers(events: Sequence[Event], samples: int | None, seconds: float) -> dict[str, float | None]:
    """What the records of one island cannot tell of a run; nothing where it has no islands, so no `samples`.

    Returns the samples of all, the committed rounds, and how often islands were lost, returned and left.
    """
    if samples is None:
        return {}
    ends = [event["kind"] for event in events if event["event"] == "lost"]
    left = ends.count(Loss.LEFT)
    return {
        "samples": samples,
        "samples_per_s": samples / seconds if seconds else None,
        "rounds": sum(event["event"] == "commit" for event in events),
        "islands_lost": len(ends) - left,
        "islands_returned": sum(len(e["newcomers"]) for e in events if e["event"] == "generation"),
        "islands_left": left,
    }
