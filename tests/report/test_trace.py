from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsgd.comm.events import MESSAGE, SPAN, Event
from hpcsgd.report.trace import Clock, Window, append, beginning, lines, read, text_of
from traces import Slice, view

EVENTS = [
    Event(MESSAGE, "alltoall", "grad_reduce", 8, 1.25, 1.5, 100.0, 4),
    Event(SPAN, "forward", "", 7, 1.0, 1.0625),
    Event(SPAN, "step 3", "", 7, 1.0, 2.0),
]


def piece(rank: int = 0, clock: Clock = Clock()) -> bytes:  # noqa: B008 - frozen
    window = Window(1.0, 2.0, 1, EVENTS)
    return text_of(lines(window, rank, "here", {7: 0}, {8: "lane"}, clock))


def test_events_become_slices(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    assert beginning(file) is None
    append(file, 1.5e9, [piece(), piece(1, Clock(10.0, 1e-6))])
    names = [line["name"] for line in read(file, '"ph": "X"')]
    assert names == ["step 3", "forward", "grad_reduce alltoall"] * 2, (
        "outer ones first, as some viewers want"
    )
    seen = view(file)
    ns = 10**9
    assert seen.slices[0, 0] == [
        Slice("step 3", ns, 2 * ns, {}),
        Slice("forward", ns, ns + ns // 16, {}),
    ]
    told = {"phase": "grad_reduce", "operation": "alltoall", "bytes": 100, "ranks": 4}
    assert seen.slices[1, 1] == [Slice("grad_reduce alltoall", 45 * ns // 4, 23 * ns // 2, told)]
    assert seen.threads[0, 0] == "training"
    assert seen.threads[0, 1] == "lane"
    assert [each["args"]["error_us"] for each in seen.instants] == [0.0, 1.0]


def test_it_grows_and_counts_on_from_where_it_began(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    for turn in range(3):
        append(file, 1.5e9 + turn, [piece()])
        assert beginning(file) == 1.5e9
        assert len(view(file).slices[0, 0]) == 2 * (turn + 1)
    assert sum(line["name"] == "step 3" for line in read(file)) == 3
    assert {line["ph"] for line in read(file, '"forward"')} == {"X"}


def test_it_is_whole_or_as_it_was(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield piece()
        raise OSError(28, "No space left on device")

    file = tmp_path / "trace.json.gz"
    with pytest.raises(OSError, match="space"):
        append(file, 1.5e9, broken())
    assert list(tmp_path.iterdir()) == []
    append(file, 1.5e9, [piece()])
    before = file.read_bytes()
    with pytest.raises(OSError, match="space"):
        append(file, 1.5e9, broken())
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_thread_keeps_its_number() -> None:
    """The numbers depend neither on the order of events nor on threads without events in a window."""
    threads, names = {7: 0}, {9: "second", 7: "training", 10: "third"}

    def numbers(*seen: int) -> dict[str, int]:
        events = [Event(MESSAGE, str(thread), "", thread, 1.0, 1.5) for thread in seen]
        found = lines(Window(1.0, 2.0, 1, events), 0, "here", threads, names, Clock())
        return {line["args"]["operation"]: line["tid"] for line in found if line["ph"] == "X"}

    assert numbers(10, 9) == {"9": 1, "10": 2}
    assert numbers(10, 11) == {"10": 2, "11": 3}
    assert numbers(9) == {"9": 1}
