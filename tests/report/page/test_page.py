"""The figures on the report page, compared with sums over the files' records that are computed here."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hpcsgd.cli import main
from hpcsgd.errors import UserError
from hpcsgd.report import page as pages
from hpcsgd.report.page import writing
from report.page.folders import EVERY, LOG, PHASES, START, Page, lines, records, run


@pytest.fixture(autouse=True)
def _needs_plotly() -> None:
    pytest.importorskip("plotly", reason="the extra [report] is not installed")


def written(*paths: Path, to: Path | None = None) -> Page:
    return Page(pages.write(paths, to).read_text(encoding="utf-8"))


def test_figures_of_one_run(tmp_path: Path) -> None:
    found = records()
    page = written(run(tmp_path / "one", found))
    assert (tmp_path / "one/report.html").exists()
    readings = [r for r in found if r["kind"] == "step"]
    tests = [r for r in found if r["kind"] == "eval"]
    distances = [r["distance"] for r in found if r["kind"] == "sync"]
    seconds = sum(r["samples"] / r["samples_per_s"] for r in readings)
    sent = sum(sum(r["phase_bytes"].values()) for r in readings)
    stale = [(int(k), n) for r in readings for k, n in r["counts"]["staleness"].items()]
    accuracies = [r["accuracy"] for r in tests]
    tiles = page.tiles
    assert tiles["state"] == "complete"
    assert tiles["P × K"] == "2 × 3"
    assert tiles["steps"] == "60"
    assert tiles["samples"] == f"{128 * len(readings):,}"
    assert tiles["training loss"] == f"{readings[-1]['loss']:.4g}"
    assert tiles["accuracy"] == f"{accuracies[-1]:.4f}"
    assert tiles["best accuracy"] == f"{max(accuracies):.4f}"
    assert tiles["best after epoch"] == str(1 + int(np.argmax(accuracies)))
    assert tiles["median D"] == f"{np.median(distances):.3g}"
    assert tiles["LSSR"] == f"{1 - len(distances) / 60:.1%}"
    assert tiles["density"] == "1.000%"
    assert tiles["staleness"] == f"{sum(k * n for k, n in stale) / sum(n for _, n in stale):.2f}"
    assert tiles["time"] == f"{seconds:.3g} s"
    assert tiles["sent by rank 0"] == f"{sent / 1000:.3g} kB"
    assert tiles["samples/s"] == f"{128 * len(readings) / seconds:,.0f}"


def test_courses_against_steps_samples_seconds_and_bytes(tmp_path: Path) -> None:
    found = records()
    page = written(run(tmp_path / "one", found))
    readings = [r for r in found if r["kind"] == "step"]
    (loss,) = page.panel("training loss")["traces"]
    assert loss["step"] == [r["step"] for r in readings]
    assert loss["y"] == pytest.approx([r["loss"] for r in readings], rel=1e-5)
    (accuracy,) = page.panel("test accuracy")["traces"]
    assert accuracy["step"] == [20, 40, 60]
    (wobble,) = page.panel("wobble")["traces"]  # of a method that the report does not know
    assert wobble["y"] == pytest.approx([r["wobble"] for r in found if "wobble" in r], rel=1e-5)
    (alone,) = page.panel("LSSR: the fraction of local steps so far")["traces"]
    told = [step for step in range(6, 61) if step % 6 == 0 or step % EVERY == 0]
    both = [step for step in told for _ in range(1 + (step % 12 == 0))]  # a sync and a step record
    assert sorted(alone["step"]) == both
    assert alone["y"] == pytest.approx([1 - (step // 6) / step for step in both], rel=1e-5)
    (stale,) = page.panel("staleness: updates by others, mean")["traces"]
    means = [2 * n / (3 + n) for n in (r["counts"]["staleness"]["2"] for r in readings)]
    assert stale["y"] == pytest.approx(means, rel=1e-5)
    assert page.data["spent"] == ["step", "samples", "seconds", "bytes"]
    steps, samples, seconds, sent = page.data["runs"][0]["ruler"]
    assert steps == [0, *(r["step"] for r in readings)]
    assert samples == [128 * i for i in range(len(readings) + 1)]
    assert np.diff(seconds) == pytest.approx([128 / r["samples_per_s"] for r in readings], rel=1e-3)
    assert np.diff(sent) == pytest.approx([sum(r["phase_bytes"].values()) for r in readings], abs=1)


def test_where_time_and_bytes_went(tmp_path: Path) -> None:
    found = records()
    page = written(run(tmp_path / "one", found))
    readings = [r for r in found if r["kind"] == "step"]
    for title, table in (
        ("seconds of training steps", "phase_seconds"),
        ("bytes sent by rank 0", "phase_bytes"),
    ):
        (bar,) = page.panel(f"{title}, by phase")["traces"]
        totals = {phase: sum(r[table].get(phase, 0) for r in readings) for phase in readings[0][table]}
        assert dict(zip(bar["y"], bar["x"], strict=True)) == pytest.approx(totals)
    areas = {t["name"]: t for t in page.panel("seconds of a step on rank 0, by phase")["traces"]}
    for phase in PHASES:
        expected = [r["phase_seconds"][phase] / EVERY for r in readings]
        assert areas[phase]["y"] == pytest.approx(expected, abs=1e-8)
    panel = page.panel("staleness: updates by others: share of steps")
    assert panel["layout"]["xaxis"]["dtick"] == 1
    (shares,) = panel["traces"]
    twos = sum(r["counts"]["staleness"]["2"] for r in readings)
    assert dict(zip(shares["x"], shares["y"], strict=True)) == pytest.approx(
        {0: 3 * len(readings) / (3 * len(readings) + twos), 2: twos / (3 * len(readings) + twos)}
    )


def test_what_is_new_in_the_metrics_is_shown(tmp_path: Path) -> None:
    strange = [
        {"kind": "weather", "step": 3, "rain": 0.5, "sky": "grey", "wind": {"north": 1.0}},
        {"kind": "weather", "step": 5, "rain": 0.25, "sky": "grey", "wind": {"north": 2.0}},
        {"kind": "eval", "step": 60, "epoch": 3, "loss": 1.0, "accuracy": 0.5, "f1": 0.75},
    ]
    page = written(run(tmp_path / "new", [*records(), *strange]))
    assert page.panel("rain (weather)")["traces"][0]["y"] == [0.5, 0.25]
    assert page.panel("wind.north (weather)")["traces"][0]["y"] == [1, 2]
    assert page.panel("f1 (eval)")["traces"][0]["y"] == [0.75]
    assert "sky (weather): grey (2 ×)" in page.text


def test_a_crashed_run(tmp_path: Path) -> None:
    """The last metrics line is incomplete and the log has no end; the page shows all complete records."""
    log = "".join(LOG.splitlines(keepends=True)[:2]).replace("60/60", "44/60")
    log += "2026-01-05 12:00:30,500 WARNING disk <full>\n"
    folder = run(tmp_path / "dead", records(46), log=log)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    page = written(folder)
    assert page.tiles["state"] == "no end on record"
    assert "it is still running, or died. Last sign of life 20" in page.text
    assert page.panel("wobble")["traces"][0]["step"][-1] == 46
    assert "2026-01-05 10:00:30 WARNING disk &lt;full&gt;" in page.text


def test_a_run_that_died_before_its_first_reading(tmp_path: Path) -> None:
    page = written(run(tmp_path / "early", [], log="".join(LOG.splitlines(keepends=True)[:1])))
    assert "early: nothing was recorded yet." in page.text
    assert page.data["panels"] == []


def test_values_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    bad = [{"kind": "method", "step": step, "wobble": float("nan")} for step in (58, 59)]
    page = written(run(tmp_path / "nan", [*records(57), *bad]))
    assert page.panel("wobble")["note"] == "2 values that are not finite, the first at step 58"


REQUEUED = """\
2026-01-05 12:00:00,400 INFO    6 ranks by mpi: mpiexec started them
2026-01-05 12:00:00,500 INFO    2 groups of 3 ranks, 20 steps an epoch
2026-01-05 12:00:20,000 INFO    epoch 1/3  step 28/60  loss 0.3  lr 0.1
2026-01-05 12:00:30,000 INFO    time limit reached: saved step 30, go on with --resume
2026-01-05 12:00:31,000 INFO    trained   30 steps, 1 epoch, 896 samples in 0:00:08
written   somewhere
2026-01-05 14:00:00,000 WARNING resuming with another configuration than before: seed 1 → 2
2026-01-05 14:00:00,100 INFO    6 ranks by mpi: mpiexec started them
2026-01-05 14:00:00,200 INFO    2 groups of 3 ranks, 20 steps an epoch
2026-01-05 14:00:01,000 INFO    resuming at step 30 from a checkpoint of 2 × 3 ranks
2026-01-05 14:00:20,000 INFO    epoch 2/3  step 48/60  loss 0.2  lr 0.1
2026-01-06 02:00:00,200 INFO    1 group of 3 ranks, 20 steps an epoch
2026-01-06 02:00:01,000 INFO    resuming at step 40 from a checkpoint of 2 × 3 ranks
2026-01-06 02:00:20,000 INFO    epoch 3/3  step 60/60  loss 0.1  lr 0.1
2026-01-06 02:00:21,000 INFO    trained   60 steps, 3 epochs, 1,920 samples in 0:00:16
"""


def test_a_requeued_run_is_one_timeline(tmp_path: Path) -> None:
    folder = run(tmp_path / "again", log=REQUEUED)
    times = ("2026-01-05T10:00:00+00:00", "2026-01-05T12:00:00+00:00", "2026-01-06T00:00:00+00:00")
    starts = [{**START, "started": at, "P": P} for at, P in zip(times, (2, 2, 1), strict=True)]
    (folder / "versions.json").write_text(json.dumps(starts))
    page = written(folder)
    rows = page.rows("Starts and log")
    assert rows["1"] == [
        "2026-01-05 10:00:00", "2026-01-05 10:00:31", "0 → 30", "–", "2 × 3", "node7", "saved, to go on"
    ]  # fmt: skip
    assert rows["2"] == [
        "2026-01-05 12:00:00", "2026-01-05 12:00:20", "30 → 48", "–", "2 × 3", "node7", "no end on record"
    ]  # fmt: skip
    assert rows["3"] == [
        "2026-01-06 00:00:00", "2026-01-06 00:00:21", "40 → 60", "8", "1 × 3", "node7", "complete"
    ]  # fmt: skip
    assert page.tiles["state"] == "complete"
    assert page.data["runs"][0]["restarts"] == [30, 40]
    traces = page.panel("steps by time of day: the starts of a requeued job")["traces"]
    assert [(t["x"][-1], t["y"][-1]) for t in traces] == [
        ("2026-01-05 10:00:31.000", 30), ("2026-01-05 12:00:20.000", 48), ("2026-01-06 00:00:21.000", 60)
    ]  # fmt: skip
    assert "WARNING resuming with another configuration" in page.text


def test_what_differs_between_runs_is_marked(tmp_path: Path) -> None:
    run(tmp_path / "sweep/a", records(seed=1))
    run(tmp_path / "sweep/b", records(seed=2), optimizer={"lr": 0.3, "momentum": 0.9})
    page = written(tmp_path / "sweep")
    assert (tmp_path / "sweep/report.html").exists()
    assert page.marked() == {"optimizer.lr", "optimizer.momentum"}
    assert page.rows("What differs") == {
        "": ["a", "b"], "optimizer.lr": ["0.1", "0.3"], "optimizer.momentum": ["–", "0.9"]
    }  # fmt: skip
    rows = page.rows("Figures")
    seconds = [
        sum(r["samples"] / r["samples_per_s"] for r in records(seed=seed) if r["kind"] == "step")
        for seed in (1, 2)
    ]
    assert rows["time"] == [f"{each:.3g} s" for each in seconds]
    assert [trace["run"] for trace in page.panel("wobble")["traces"]] == [0, 1]
    assert page.panel("wobble")["traces"][1]["y"][0] == pytest.approx(records(seed=2)[0]["wobble"], rel=1e-5)


def test_runs_of_many_are_rows(tmp_path: Path) -> None:
    for i in range(8):
        run(tmp_path / f"sweep/{i}", records(seed=i), seed=i)
    rows = written(tmp_path / "sweep").rows("Figures")
    assert list(rows) == ["", *map(str, range(8))]
    assert rows["3"][rows[""].index("steps")] == "60"


def test_a_comparison_has_its_labels_in_its_order(tmp_path: Path) -> None:
    labels = ["sgp", "bsp parallel.groups=1"]
    for name in ("sgp", "bsp-parallel.groups=1"):
        run(tmp_path / "compare" / name)
    told = {"ranks": 4, "variants": [{"label": label} for label in labels]}
    (tmp_path / "compare/compare.json").write_text(json.dumps(told))
    page = written(tmp_path / "compare")
    assert [each["label"] for each in page.data["runs"]] == labels


def test_runs_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    paths = [run(tmp_path / name) for name in ("a/x", "b/x", "b/y")]
    page = written(*paths, paths[0], to=tmp_path / "r.html")
    assert [each["label"] for each in page.data["runs"]] == ["a/x", "b/x", "y"]


def test_nothing_from_files_is_taken_for_html(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script><img src=x onerror="alert(2)">'
    found = [
        *records(),
        {"kind": "method", "step": 60, evil: 1.0},
        {"kind": evil, "step": 60, "x": 1.0, "word": evil},
        {"kind": "step", "step": 64, "epoch": 1, "loss": 1.0, "lr": 0.1, "samples": 1, "samples_per_s": 1.0,
         "phase_seconds": {evil: 1.0}, "phase_bytes": {evil: 1.0}, "counts": {evil: {"1": 1}}},
    ]  # fmt: skip
    name = "<script>alert(3)<!--&amp;"
    folder = run(tmp_path / name, found, log=f"{LOG}2026-01-05 12:00:32,000 ERROR   {evil}\n", note=evil)
    (folder / "versions.json").write_text(json.dumps([START | {"host": evil, "mpi": "</table>"}]))
    other = run(tmp_path / "other" / name)
    for page in (written(folder), written(folder, other, to=tmp_path / "report.html")):
        tags = [tag for tag, _ in page.elements]
        assert tags.count("script") == 3
        assert "img" not in tags
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        assert "alert(1)" in page.text, "shown, but as text"
        labels = json.dumps([page.data["runs"], page.data["panels"]])
        assert "<img" not in "".join(t.get("name", "") for p in page.data["panels"] for t in p["traces"]), (
            "Plotly takes names for HTML"
        )
        assert "&lt;script&gt;alert(3)&lt;!--&amp;amp;" in labels


def test_it_loads_nothing(tmp_path: Path) -> None:
    page = written(run(tmp_path / "one"))
    assert not [a for _, a in page.elements if {"src", "href", "action", "srcset"} & a.keys()]
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe-inline" not in policy.split("script-src")[1]


@pytest.mark.slow
def test_many_courses_stay_below_the_largest_page(tmp_path: Path) -> None:
    """With many curves each has fewer points, and a page with too many metrics leaves some plots out."""
    draw = np.random.default_rng(0)
    for i in range(20):
        notes = [
            {"kind": "method", "step": step}
            | {f"n{k}": float(x) for k, x in enumerate(draw.normal(size=130))}
            for step in range(1, 101)
        ]
        run(tmp_path / f"sweep/{i:02}", notes)
    target = pages.write([tmp_path / "sweep"])
    assert target.stat().st_size < writing.LARGEST
    page = Page(target.read_text())
    traces = page.panel("n119")["traces"]
    assert len(traces) == 20
    assert all(trace["of"] == 100 > len(trace["y"]) > 4 for trace in traces)
    assert "No room for the plots of 10 more values: n120, n121" in page.text


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("metrics.jsonl", '{"kind": "step"}\n', r"metrics\.jsonl:1: not a metrics record: no kind and step"),
        ("metrics.jsonl", '{"kind": "step", "step": 1}\n', r"metrics\.jsonl:1: not a metrics record: no '"),
        ("metrics.jsonl", "[]\n", r"metrics\.jsonl:1: not a metrics record"),
        ("metrics.jsonl", lines(records()) + "\0\0\n", r"metrics\.jsonl:\d+: not a metrics record"),
        ("versions.json", "[", r"versions\.json: not JSON"),
        ("versions.json", "{}", r"versions\.json: not the starts of a run"),
        ("versions.json", '[{"P": 1}]', r"versions\.json: not the starts of a run: 'started'"),
        ("job.toml", "= 3", r"job\.toml: not valid TOML"),
        ("trace.json.gz", "garbage", r"trace\.json\.gz: not a trace"),
        ("events.jsonl", "garbage\n", r"events\.jsonl:1"),
    ],
)
def test_a_damaged_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, says: str
) -> None:
    folder = run(tmp_path / "one")
    (folder / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder)])
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    with pytest.raises(UserError, match=says):
        pages.write([folder])


def test_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for folder, says in ((tmp_path / "empty", "no run folder"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(SystemExit):
            main(["report", str(folder)])
        err = capsys.readouterr().err
        assert err.startswith(f"hpcsgd: {folder}: {says}")
        assert err.count("\n") == 1


def test_without_the_extra_it_says_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    says = r'^the report needs the library `plotly`: pip install "hpcsgd\[report\]"$'
    with pytest.raises(UserError, match=says):
        pages.write([run(tmp_path / "one")])


def test_the_command_says_where_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = run(tmp_path / "one"), tmp_path / "r.html"
    main(["report", str(folder), "--to", str(target)])
    assert capsys.readouterr().out == f"{target}\n"
    assert Page(target.read_text()).tiles["steps"] == "60"


def test_a_folder_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    for target in (Path(), folder):
        with pytest.raises(UserError, match=r"^--to \S+: a folder, and the page is a file: name one in it$"):
            pages.write([folder], target)
    assert [*tmp_path.iterdir()] == [folder]


def test_live_goes_on_until_the_run_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The page reloads itself until the run is complete.

    It is replaced atomically, and temporarily damaged metrics do not end the updates. The pause is four times
    the 2 s that writing takes.
    """
    begun, rest = LOG.splitlines(keepends=True)[:2], LOG.splitlines(keepends=True)[2:]
    folder = run(tmp_path / "one", records(30), log="".join(begun))
    target = folder / "report.html"
    seen: list[Page] = []

    def meanwhile(seconds: float) -> None:
        assert seconds == 8
        seen.append(Page(target.read_text()))
        assert not list(folder.glob(".report*")), "nothing half written is left"
        match len(seen):
            case 1:
                (folder / "metrics.jsonl").write_text("damaged\n")
            case 2:
                (folder / "metrics.jsonl").write_text(lines(records(40)))
            case 3:
                (folder / "metrics.jsonl").write_text(lines(records(60)))
                (folder / "run.log").write_text("".join(begun + rest))

    clock = SimpleNamespace(sleep=meanwhile, monotonic=itertools.count(100, 2).__next__)
    monkeypatch.setattr(writing, "time", clock)
    assert pages.follow([folder], every=7) == target
    assert [page.tiles["steps"] for page in seen] == ["30", "30", "40"]
    assert caplog.text.count("will look again") == 1
    assert all('data-every="7"' in page.text for page in seen)
    last = Page(target.read_text())
    assert last.tiles["steps"] == "60"
    assert "data-every" not in last.text.split("<script")[0]
