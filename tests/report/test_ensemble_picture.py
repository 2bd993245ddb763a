"""What is drawn of an event log: who was there when, and what there is no data for is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcsgd.islands.event_log import Event, EventLog, Loss, read
from hpcsgd.report.ensemble_picture import COLOURS, NAMED, RETURNED, plot_events, tell


def happened(*events: tuple) -> list[Event]:
    """Of (at, event, fields)."""
    return [{"event": event, "unix": 1e9 + at, "at": at, **fields} for at, event, fields in events]


def members(at: float, *islands: int) -> tuple:
    return at, "generation", {"generation": 1, "members": list(islands), "newcomers": [], "rounds": 0}


def committed(at: float, epochs: float, *islands: int) -> tuple:
    progress = {"t": 1, "epoch": int(epochs), "fraction": epochs % 1}
    return at, "commit", {"generation": 1, "rounds": 1, "members": list(islands), **progress}


def lost(at: float, island: int, kind: Loss = Loss.DIED) -> tuple:
    return at, "lost", {"island": island, "why": "", "kind": str(kind)}


def given(at: float, **units: int) -> tuple:
    return at, "units", {"unit": "samples", "units": {int(island[1:]): x for island, x in units.items()}}


STORY = happened(
    (0, "started", {"island": 0, "life": "a", "ranks": 2}),
    members(2, 0, 1),
    given(2, i0=128, i1=128),
    committed(5, 0.5, 0, 1),
    lost(7, 0),
    (7, "ended", {"island": 0, "life": "a", "code": -9}),
    members(8, 1),
    given(8, i1=256),
    committed(9, 1, 1),
    members(10, 0, 1),
    given(10, i0=128, i1=128),
    committed(12, 1.5, 0, 1),
    (12, "finished", {}),
)


def test_a_line_is_there_while_its_island_is_a_member() -> None:
    story = tell(STORY)
    assert dict(story.lines) == {
        0: [[(2, 0), (5, 0.5), (7, 0.5)], [(10, 1), (12, 1.5), (12, 1.5)]],
        1: [[(2, 0), (5, 0.5), (9, 1), (12, 1.5), (12, 1.5)]],
    }
    assert dict(story.marks) == {"died": [(0, (7, 0.5))], RETURNED: [(0, (10, 1))]}
    assert story.moves == [8, 10]
    assert story.end == 12


def test_a_run_that_is_still_going_on_is_drawn_as_far_as_it_is() -> None:
    story = tell(happened(members(0, 0, 1), committed(3, 0.25, 0, 1), (4, "ended", {})))
    assert story.lines[0] == story.lines[1] == [[(0, 0), (3, 0.25), (4, 0.25)]]


def test_who_is_no_longer_a_member_ends_without_a_mark_where_nothing_says_why() -> None:
    story = tell(happened(members(0, 0, 1), committed(3, 1, 1)))
    assert story.lines[0] == [[(0, 0), (3, 0)]]
    assert not story.marks


def test_an_island_is_lost_once() -> None:
    story = tell(happened(members(0, 0, 1), lost(1, 0, Loss.CUT), lost(2, 0), lost(2, 7), members(3, 1)))
    assert dict(story.marks) == {"cut": [(0, (1, 0))]}


def test_the_first_and_those_after_a_stop_do_not_return() -> None:
    events = happened(
        members(0, 0, 1), lost(1, 0), (2, "stopped", {}), members(50, 0, 1), members(60, 0, 1, 2)
    )
    story = tell(events)
    assert story.lines[1] == [[(0, 0), (2, 0)], [(50, 0), (60, 0)]]
    assert story.marks[RETURNED] == [(2, (60, 0))]


def test_who_alone_is_left_and_comes_back_returns() -> None:
    story = tell(happened(members(0, 0), lost(1, 0, Loss.SILENT), members(2, 0)))
    assert {kind: len(places) for kind, places in story.marks.items()} == {"silent": 1, RETURNED: 1}


def test_units_given_out_as_before_are_no_move() -> None:
    assert tell(happened(given(0, i0=4), given(1, i0=4), given(2, i0=5))).moves == [2]


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """Of each figure that is saved."""
    seen: list[Axes] = []
    save = Figure.savefig

    def spy(figure: Figure, *arguments: object, **options: object) -> None:
        seen.extend(figure.axes)
        save(figure, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", spy)
    return seen


PROGRESS, UNITS = "1.5 epochs in 12 s: 1 lost, 1 returned", "samples: 256 in all"


@pytest.mark.parametrize(
    ("events", "titles"),
    [
        (STORY, [PROGRESS, UNITS]),
        ([event for event in STORY if event["event"] != "units"], [PROGRESS]),
        ([event for event in STORY if event["event"] == "units"], [UNITS]),
        (happened(members(0, 0)), ["0 epochs in 0 s: nobody lost"]),
        (
            happened(given(0, i0=8), (1, "units", {"unit": "ranks", "units": {}})),
            ["samples: 8 in all", "ranks: 0 in all"],
        ),
        (happened(given(0, i0=8, i1=8), given(1, i1=8)), ["samples: 8 to 16 in all"]),
    ],
    ids=["all", "no units", "units only", "one event", "two units", "units left over"],
)
def test_each_panel_with_data_is_drawn_and_no_other(
    tmp_path: Path, panels: list[Axes], events: list[Event], titles: list[str]
) -> None:
    plot_events(events, tmp_path / "islands.png")
    assert [axes.get_title(loc="left") for axes in panels] == titles
    height, width, _ = image.imread(tmp_path / "islands.png").shape
    assert width >= 1000
    assert height >= 300
    assert [path.name for path in tmp_path.iterdir()] == ["islands.png"]


@pytest.mark.parametrize("events", [[], happened((0, "started", {"island": 0}), (1, "stopped", {}))])
def test_nobody_averaged_nothing_drawn(tmp_path: Path, events: list[Event]) -> None:
    plot_events(events, tmp_path / "islands.png")
    assert not list(tmp_path.iterdir())


def test_what_has_as_many_units_is_drawn_beside_and_the_rest_in_its_place(
    tmp_path: Path, panels: list[Axes]
) -> None:
    plot_events(happened(given(0, i0=64, i1=64, i2=100), given(1, i0=64, i2=100)), tmp_path / "islands.png")
    first, second, third = ([*map(float, line.get_ydata())] for line in panels[0].lines[:3])  # type: ignore[arg-type]
    assert 64 < first[0] < 66
    assert first[0] + second[0] == pytest.approx(128)
    assert first[1] == 64
    assert second[1] != second[1]  # it has none
    assert third == [100, 100, 100]


def test_every_moment_of_a_move_is_marked_in_all_panels(tmp_path: Path, panels: list[Axes]) -> None:
    plot_events(STORY, tmp_path / "islands.png")
    for axes in panels:
        dashed = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]  # type: ignore[index]
        assert dashed == [8, 10]


def test_losses_are_filled_marks_and_returns_hollow_ones(tmp_path: Path, panels: list[Axes]) -> None:
    plot_events(STORY, tmp_path / "islands.png")
    marks = [line for line in panels[0].lines if line.get_linestyle() == "None"]
    assert [(line.get_marker(), *line.get_xydata()[0]) for line in marks] == [("X", 7, 0.5), ("o", 10, 1)]  # type: ignore[index]
    assert [line.get_markerfacecolor() for line in marks] == [COLOURS[0], "white"]


@pytest.mark.parametrize("islands", [1, 16, 40])
def test_the_legend_names_as_many_islands_as_can_be_read(
    tmp_path: Path, panels: list[Axes], islands: int
) -> None:
    events = happened(members(0, *range(islands)), committed(1, 1, *range(islands)), lost(2, 0, Loss.LATE))
    plot_events(events, tmp_path / "islands.png")
    legend = panels[0].get_figure().legends[0]  # type: ignore[union-attr]
    names = [f"island {island}" for island in range(min(islands, NAMED))]
    more = [f"and {islands - NAMED} more"] * (islands > NAMED)
    assert [text.get_text() for text in legend.get_texts()] == [*names, *more, "late"]
    assert len(set(COLOURS)) == len(COLOURS) >= NAMED


@pytest.mark.slow
def test_a_log_is_drawn_as_it_is_read(tmp_path: Path, panels: list[Axes]) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        events.generation(generation=1, members=[0, 1], newcomers=[], rounds=0)
        events.units(unit="threads", units={0: 3, 1: 5})
        events.commit(generation=1, rounds=1, members=[0, 1], counted=[0, 1], t=10, epoch=2, fraction=0.0)
        for kind in Loss:
            events.lost(island=1, why="", kind=kind)
            events.generation(generation=2, members=[0, 1], newcomers=[1], rounds=1)
        events.finished()
    plot_events(read(tmp_path / "events.jsonl"), tmp_path / "islands.png")
    first, second = (axes.get_title(loc="left") for axes in panels)
    assert first.startswith("2 epochs in ")
    assert first.endswith(": 4 lost, 5 returned, 1 left")
    assert second == "threads: 8 in all"
