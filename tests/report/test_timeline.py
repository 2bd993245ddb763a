"""The picture of a trace shows the last steps of a few ranks, with one row per thread."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hpcsgd.comm.events import MESSAGE, SPAN, WAIT, Event
from hpcsgd.report import timeline
from hpcsgd.report.timeline import plot_timeline
from hpcsgd.report.trace import Clock, TraceSync, Window, append, lines, text_of

MS = 1e-3
OWNER, COMM_THREAD = 7, 8


def step(t: int) -> list[Event]:
    """Return a step of 10 ms: forward, backward, and a wait of 2 ms for a message that takes 3 ms."""
    at = 10 * t * MS
    return [
        Event(SPAN, f"step {t}", "", OWNER, at, at + 10 * MS),
        Event(SPAN, "forward", "", OWNER, at, at + 4 * MS),
        Event(SPAN, "backward", "", OWNER, at + 4 * MS, at + 7 * MS),
        Event(MESSAGE, "alltoall", "grad_reduce", COMM_THREAD, at + 6 * MS, at + 9 * MS, 100.0, 4),
        Event(WAIT, "alltoall", "grad_reduce", OWNER, at + 7 * MS, at + 9 * MS),
    ]


def traced(file: Path, ranks: int, steps: int, synced: int | None = None) -> Path:
    events = [event for t in range(steps) for event in step(t)]
    if synced is not None:
        events.append(
            Event(
                MESSAGE,
                "allreduce",
                "model_average",
                COMM_THREAD,
                0.01 * synced + 9 * MS,
                0.01 * synced + 10 * MS,
            )
        )
    syncs = [] if synced is None else [TraceSync(synced, 0.5, 10 * synced * MS + 10 * MS)]
    window = Window(0.0, 10 * steps * MS, steps, events, syncs)
    pieces = (
        text_of(lines(window, r, "here", {OWNER: 0}, {COMM_THREAD: "lane"}, Clock())) for r in range(ranks)
    )
    append(file, 0.0, list(pieces))
    return file


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    found: list[Figure] = []
    monkeypatch.setattr(timeline, "save", lambda figure, target: found.append(figure))
    return found


def test_the_last_steps_of_some_ranks(tmp_path: Path, figures: list[Figure]) -> None:
    plot_timeline(traced(tmp_path / "trace.json.gz", ranks=5, steps=6), tmp_path / "timeline.png")
    (figure,) = figures
    (axes,) = figure.axes
    assert axes.get_xlim() == pytest.approx((0, 30)), "three steps of 10 ms"
    assert [text.get_text() for text in axes.texts] == [" step 3", " step 4", " step 5"]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == [name for rank in range(4) for name in (f"rank {rank}", "thread 1")]
    assert all(high - low > 0 for low, high in zip(axes.get_yticks()[1:], axes.get_yticks(), strict=False))
    assert not any(line.get_visible() for line in axes.get_ygridlines()), "bars would hide and show it"
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["forward", "backward", "waiting", "grad_reduce (messages)"]
    bars = [bar.get_paths()[0].get_extents() for bar in axes.collections]
    assert {(round(bar.x0), round(bar.width)) for bar in bars} == {
        (first + 10 * t, width) for first, width in ((0, 4), (4, 3), (6, 3), (7, 2)) for t in range(3)
    }


def test_it_ends_with_the_last_step_in_which_groups_synchronized(
    tmp_path: Path, figures: list[Figure]
) -> None:
    plot_timeline(traced(tmp_path / "trace.json.gz", ranks=1, steps=6, synced=3), tmp_path / "timeline.png")
    assert [text.get_text() for text in figures[0].axes[0].texts] == [" step 1", " step 2", " step 3"]


def test_where_no_step_was_traced_there_is_none(tmp_path: Path, figures: list[Figure]) -> None:
    plot_timeline(traced(tmp_path / "trace.json.gz", ranks=2, steps=0), tmp_path / "timeline.png")
    assert figures == []
