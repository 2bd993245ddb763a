from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hpcsgd.comm.events import MESSAGE, SPAN, WAIT, Event
from hpcsgd.report.overlap import overlap, per_step, together
from hpcsgd.report.page import write
from hpcsgd.report.page.ranks import ranks
from hpcsgd.report.trace import NAME, Clock, TraceSync, Window, append, lines, text_of, totals_line
from report.page.folders import Page, run

OWNER, COMM_THREAD = 7, 8


def window(rank: int, begin: float) -> Window:
    """Return a window of two steps; ranks with higher numbers wait longer for gradients.

    Events before the window do not count.
    """
    wait = 0.125 * (rank + 1)
    events = [
        Event(MESSAGE, "allreduce", "model_average", COMM_THREAD, begin - 1.0, begin + 0.0625),
        Event(SPAN, "forward", "", OWNER, begin, begin + 0.25),
        Event(SPAN, "update", "", OWNER, begin + 0.25, begin + 1.0),
        Event(WAIT, "alltoall", "grad_reduce", OWNER, begin + 0.25, begin + 0.25 + wait),
        Event(MESSAGE, "alltoall", "grad_reduce", COMM_THREAD, begin + 0.125, begin + 0.25 + wait, 100.0, 4),
        Event(SPAN, "step 3", "", OWNER, begin, begin + 1.0),
        Event(SPAN, "step 4", "", OWNER, begin + 1.0, begin + 2.0),
    ]
    return Window(begin, begin + 2.0, 2, events, (TraceSync(4, 0.5, begin + 2.0),))


def trace(file: Path, size: int = 3) -> None:
    for begin in (100.0, 200.0):
        pieces, own = [], []
        for rank in range(size):
            seen, clock = window(rank, begin), Clock(10.0 * rank, 1e-6)
            pieces.append(text_of(lines(seen, rank, "here", {OWNER: 0}, {COMM_THREAD: "lane"}, clock)))
            own.append(overlap(seen, OWNER))
        totals = {"steps": 2, "ranks": size, "clock_error": 1e-6, **together(own)}
        pieces.append(text_of([totals_line(begin + 2.0, Clock(), totals)]))
        append(file, 1.5e9, pieces)


def test_every_rank_has_its_own_seconds(tmp_path: Path) -> None:
    trace(tmp_path / NAME)
    found = ranks(tmp_path / NAME)
    assert list(found) == [0, 1, 2]
    for number, rank in found.items():
        wait = 0.125 * (number + 1)
        assert rank.steps == 4
        assert rank.per_step("exposed") == pytest.approx({"grad_reduce": wait / 2})
        assert rank.per_step("hidden") == pytest.approx(
            {"grad_reduce": 0.125 / 2, "model_average": 0.0625 / 2}
        )
        computing = {"data": 0, "forward": 0.125, "backward": 0, "update": (0.75 - wait) / 2}
        assert rank.per_step("computing") == pytest.approx(computing)


def test_their_mean_is_what_the_summary_says(tmp_path: Path) -> None:
    trace(tmp_path / NAME)
    found, told = ranks(tmp_path / NAME), per_step(tmp_path / NAME)
    for quantity in ("exposed", "hidden"):
        mean = Counter[str]()
        for rank in found.values():
            mean.update(rank.per_step(quantity))
        expected = told[f"{quantity}_seconds"]
        assert {phase: total / len(found) for phase, total in mean.items()} == pytest.approx(expected)


def test_the_page_has_a_bar_for_each_rank(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra [report] is not installed")
    trace(run(tmp_path / "one") / NAME)
    page = Page(write([tmp_path / "one"]).read_text())
    titles = [p["title"] for p in page.data["panels"] if " by rank:" in p["title"]]
    assert [title.split(",")[0] for title in titles] == ["computing", "exposed", "hidden"]
    (exposed,) = page.panel(titles[1])["traces"]
    assert (exposed["name"], exposed["x"]) == ("grad_reduce", [0, 1, 2])
    assert exposed["y"] == pytest.approx([0.0625, 0.125, 0.1875], rel=1e-3)
    assert "known where steps were traced" not in page.text


def test_a_run_of_groups_shows_who_was_there_how_far_and_with_what(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra [report] is not installed")
    folder = run(tmp_path / "ensemble", [])
    (folder / "metrics.jsonl").unlink()
    reading = {"kind": "step", "epoch": 1, "lr": 0.1, "phase_seconds": {"compute": 1.0}, "phase_bytes": {}}
    for replica_group, steps in ((0, (10, 20)), (1, (10, 20, 30))):
        (folder / f"replica_groups/{replica_group}").mkdir(parents=True)
        speed = {"samples": 64, "samples_per_s": 32.0}
        found = [reading | speed | {"step": step, "loss": replica_group + step / 100} for step in steps]
        if replica_group == 0:
            found.append({"kind": "eval", "step": 20, "epoch": 1, "loss": 0.5, "accuracy": 0.875})
        text = "".join(json.dumps(record) + "\n" for record in found)
        (folder / f"replica_groups/{replica_group}/metrics.jsonl").write_text(text)
    at = {"unix": 1.5e9, "generation": 1, "rounds": 1, "newcomers": []}
    commit = {"event": "commit", "counted": [0, 1], "t": 10, "epoch": 0, "fraction": 0.5}
    events = [
        {"event": "generation", "at": 0.0, "members": [0, 1]} | at,
        commit | {"at": 1.0, "members": [0, 1]} | at,
        {"event": "units", "at": 0.0, "unix": 1.5e9, "unit": "samples", "units": {"0": 8, "1": 8}},
        {"event": "lost", "at": 2.0, "replica_group": 0, "why": "it died", "kind": "died", "unix": 1.5e9},
        {"event": "generation", "at": 2.0, "members": [1]} | at,
        {"event": "units", "at": 2.0, "unix": 1.5e9, "unit": "samples", "units": {"1": 16}},
        commit | {"at": 4.0, "members": [1], "counted": [1], "epoch": 1} | at,
        {"event": "finished", "at": 5.0, "unix": 1.5e9},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = Page(write([folder]).read_text())
    assert page.tiles["state"] == "complete"
    assert page.tiles["samples"] == f"{5 * 64}", "of both"
    assert page.panel("training loss")["traces"][0]["y"] == [1.1, 1.2, 1.3], "of the one that made the most"
    assert page.panel("test accuracy")["traces"][0]["y"] == [0.875], "of whoever was first"
    traces = {t["name"]: t for t in page.panel("members: which replica groups averaged when")["traces"]}
    assert traces["replica group 0"]["x"][:2] == [0.0, 2.0]
    assert traces["replica group 1"]["x"][:2] == [0.0, 5.0]
    assert (traces["died"]["x"], traces["died"]["y"]) == ([2.0], [0])
    line, died = page.panel("progress: 1.5 epochs in 5 s")["traces"]
    assert list(zip(line["x"], line["y"], strict=True)) == [(0, 0), (1, 0.5), (2, 0.5), (4, 1.5), (5, 1.5)]
    assert (died["x"], died["y"], died["text"]) == ([2.0], [0.5], ["replica group 0"])
    units = {t["name"]: t["y"] for t in page.panel("samples of each replica group: 16 in all")["traces"]}
    assert units == {"replica group 0": [8, None, None], "replica group 1": [8, 16, 16]}
    assert (page.tiles["elastic rounds"], page.tiles["replica groups lost"]) == ("2", "1")
