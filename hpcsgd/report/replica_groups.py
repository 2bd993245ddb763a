"""The event log of an elastic run as a timeline: members, progress and resources of replica groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcsgd.elastic.event_log import Event, Loss

RETURNED = "returned"
Point = tuple[float, float]
"""A time in seconds, and the progress at that time in epochs."""


@dataclass
class Timeline:
    """The progress of the replica groups over time, as lines, and their losses and returns, as marks.

    Groups and kinds of losses are in the order of their first event.
    """

    lines: dict[int, list[list[Point]]] = field(default_factory=lambda: defaultdict(list))
    """For each group: a line of points for each period in which the group was a member."""
    marks: dict[str, list[tuple[int, Point]]] = field(default_factory=lambda: defaultdict(list))
    """By kind of loss, or `RETURNED`: each group's number, and the point at which its line ends or begins."""
    units: dict[str, list[tuple[float, Mapping[int, int]]]] = field(default_factory=lambda: defaultdict(list))
    """By resource: the seconds of each assignment, and the units of each group from then on."""
    end: float = 0.0
    """The time of the last event of the log, in seconds."""

    @property
    def replica_groups(self) -> list[int]:
        had = (
            replica_group for steps in self.units.values() for _, units in steps for replica_group in units
        )
        return sorted({*self.lines, *had})

    @property
    def progress(self) -> list[Point]:
        """The progress over time, which all members share: that of the last committed round."""
        return sorted({point for lives in self.lines.values() for life in lives for point in life})


def tell(events: Sequence[Event]) -> Timeline:
    """Return the timeline of all replica groups, from the events of an elastic run's log."""
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
            case "lost" | "late":
                replica_group = event["replica_group"]
                if replica_group in members:
                    _leave(timeline, {replica_group}, here)
                    timeline.marks[event.get("kind", Loss.LATE)].append((replica_group, here))
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
    """End the lines of these groups at the point `here`, because they are no longer members."""
    for replica_group in replica_groups:
        timeline.lines[replica_group][-1].append(here)


def numbers(events: Sequence[Event], samples: int | None, seconds: float) -> dict[str, float | None]:
    """Return the numbers of an elastic run that the records of a single group do not have.

    They are the `samples` of all groups, the committed rounds, and how often groups were lost, returned and
    left. Late groups whose work could still count have a number of their own; they are lost, too, if it did
    not. For a static run `samples` is None, and the result is empty.
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
        "groups_late": sum(event["event"] == "late" for event in events),
    }
