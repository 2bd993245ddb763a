"""GOAL schedules, read strictly: what is not as it has to be is an AssertionError."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

OPERATION = re.compile(
    r"(l\d+): (?:(calc) (\d+)|(send) (\d+)b to (\d+) tag (\d+)|(recv) (\d+)b from (\d+) tag (\d+))"
)
REQUIRES = re.compile(r"(l\d+) requires (l\d+)")
Label = tuple[int, str]


@dataclass
class Schedule:
    ranks: int
    nanoseconds: dict[Label, int] = field(default_factory=dict)
    """Of calculations."""
    ends: dict[str, dict[tuple[int, int, int], Label]] = field(
        default_factory=lambda: {"send": {}, "recv": {}}
    )
    """By (source, destination, tag)."""
    size: dict[Label, int] = field(default_factory=dict)
    before: dict[Label, list[Label]] = field(default_factory=lambda: defaultdict(list))

    def critical_path(self, alpha: float, beta: float) -> float:
        """Nanoseconds; what is received is there when it is sent."""
        assert self.ends["send"].keys() == self.ends["recv"].keys(), "a message without its other end"
        source = {self.ends["recv"][message]: self.ends["send"][message] for message in self.ends["recv"]}
        assert all(self.size[recv] == self.size[send] for recv, send in source.items())
        done: dict[Label, float] = {}
        for label in self._in_order(source):
            begin = max((done[other] for other in self.before[label]), default=0.0)
            if label in source:
                done[label] = max(begin, done[source[label]])
            elif label in self.size:
                done[label] = begin + alpha + beta * self.size[label]
            else:
                done[label] = begin + self.nanoseconds[label]
        return max(done.values())

    def _in_order(self, source: dict[Label, Label]) -> list[Label]:
        """No circle, or it is none of them."""
        labels = [*self.nanoseconds, *self.size]
        needs = {x: [*self.before[x], *([source[x]] if x in source else [])] for x in labels}
        after = defaultdict(list)
        for label, others in needs.items():
            for other in others:
                after[other].append(label)
        missing = {label: len(others) for label, others in needs.items()}
        order = [label for label in labels if not missing[label]]
        for label in order:
            for later in after[label]:
                missing[later] -= 1
                if not missing[later]:
                    order.append(later)
        assert len(order) == len(labels), "operations that wait for each other"
        return order


def read(text: str) -> Schedule:
    lines = iter([line for line in text.splitlines() if line])
    first = re.fullmatch(r"num_ranks (\d+)", next(lines))
    assert first, "no num_ranks"
    schedule = Schedule(int(first[1]))
    for rank in range(schedule.ranks):
        assert next(lines) == f"rank {rank} {{"
        for line in lines:
            if line == "}":
                break
            _add(schedule, rank, line)
        else:
            raise AssertionError(f"rank {rank} does not end")
    assert next(lines, None) is None, "more ranks than told"
    return schedule


def _add(schedule: Schedule, rank: int, line: str) -> None:
    if requires := REQUIRES.fullmatch(line):
        label, other = (rank, requires[1]), (rank, requires[2])
        assert {label, other} <= schedule.nanoseconds.keys() | schedule.size.keys(), line
        schedule.before[label].append(other)
        return
    operation = OPERATION.fullmatch(line)
    assert operation, line
    name, calc, nanoseconds, send, sent, to, to_tag, _, received, source, from_tag = operation.groups()
    label = (rank, name)
    assert label not in schedule.nanoseconds.keys() | schedule.size.keys(), f"{name} twice"
    if calc:
        schedule.nanoseconds[label] = int(nanoseconds)
        return
    message = (rank, int(to), int(to_tag)) if send else (int(source), rank, int(from_tag))
    assert message[0] != message[1], line
    assert max(message[:2]) < schedule.ranks, line
    known = schedule.ends["send" if send else "recv"]
    assert message not in known, f"{line}: the same message twice"
    known[message] = label
    schedule.size[label] = int(sent if send else received)
