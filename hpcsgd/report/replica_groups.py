"""The event log of an elastic run as a timeline: members, progress and resources of replica groups."""

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
    """Lines and marks of the replica groups. Groups and kinds are in the order of their first event."""

    lines: dict[int, list[list[Point]]] = field(default_factory=lambda: defaultdict(list))
    """For each group, one line per time that it was a member."""
    marks: dict[str, list[tuple[int, Point]]] = field(default_factory=lambda: defaultdict(list))
    """By kind of loss or `RETURNED`: the group, and where its line ends or begins."""
    units: dict[str, list[tuple[float, Mapping[int, int]]]] = field(default_factory=lambda: defaultdict(list))
    """By resource: each time at which it was assigned, and the units that each group has from then on."""
    end: float = 0.0
    """End of the log, in seconds."""

    @property
    def replica_groups(self) -> list[int]:
        had = (
            replica_group for steps in self.units.values() for _, units in steps for replica_group in units
        )
        return sorted({*self.lines, *had})

    @property
    def progress(self) -> list[Point]:
        """The progress of the members over time. All have the progress of the last committed round."""
        return sorted({point for lives in self.lines.values() for life in lives for point in life})


def tell(events: Sequence[Event]) -> Timeline:
    """Return the lines of all replica groups, from changes of members and committed rounds."""
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
    """End the lines of these groups at the point `here`."""
    for replica_group in replica_groups:
        timeline.lines[replica_group][-1].append(here)


def numbers(events: Sequence[Event], samples: int | None, seconds: float) -> dict[str, float | None]:
    """Return the numbers of an elastic run that the records of a single group do not have.

    They are the `samples` of all groups, the committed rounds, and how often groups were lost, returned and
    left. For a static run `samples` is None, and the result is empty.
    """
    if samples is None:
        return {}
    ends = [event["kind"] for event in events if event["event"] == "lost"]
    left = ends.count(Loss.LEFT)
    return {
        "samples": samples,
        "samples_per_s": samples / seconds if seconds else None,
        "rounds": sum(event["event"] == "commit" for event in events),
        "groups_lost": len(ends) - left,
        "groups_returned": sum(len(e["newcomers"]) for e in events if e["event"] == "generation"),
        "groups_left": left,
    }
