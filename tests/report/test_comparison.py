"""A comparison of variants as numbers, as a table and as a picture."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from hpcsgd.report.comparison import Comparison, Entry, Point, comparison_text, write_comparison
from hpcsgd.report.comparison_picture import plot_comparison
from hpcsgd.report.metrics import Record


def records(pace: float, sent: float, *values: float, key: str = "accuracy") -> list[Record]:
    """Return two step records and one evaluation for each of `values`."""
    made: list[Record] = []
    for n, value in enumerate(values, start=1):
        steps = [
            {
                "kind": "step", "step": step, "epoch": n, "loss": 1.0, "lr": 0.1, "samples": 8,
                "samples_per_s": 8 / pace, "phase_seconds": {"compute": pace},
                "phase_bytes": {"grad_reduce": sent, "model_average": 0.0},
            }
            for step in (2 * n - 1, 2 * n)
        ]  # fmt: skip
        tested = {"kind": "eval", "step": 2 * n, "epoch": n, "loss": 1 / n, key: value, "distance": 0.0}
        made += [*steps, tested]
    return made


BSP = Entry("bsp", 1, 4, True, records(0.5, 1e6, 0.5, 0.7, 0.8))
LOCAL = Entry("local", 4, 1, False, records(0.25, 1e5, 0.6, 0.9))
BOTH = Comparison([BSP, LOCAL], target=0.7)


def test_what_was_spent_up_to_each_evaluation() -> None:
    assert BOTH.course(BSP) == [Point(2, 1.0, 2e6, 0.5), Point(4, 2.0, 4e6, 0.7), Point(6, 3.0, 6e6, 0.8)]


@pytest.mark.parametrize(
    ("key", "values", "target", "steps"),
    [
        ("accuracy", (0.5, 0.7, 0.6), 0.7, 4),
        ("accuracy", (0.5, 0.7, 0.6), 0.71, None),
        ("perplexity", (90.0, 50.0, 40.0), 50, 4),
        ("perplexity", (90.0, 50.0, 40.0), 30, None),
        ("none", (0, 0, 0), 0.5, 4),  # judged by the loss: 1, 1/2, 1/3
    ],
)
def test_when_the_target_is_reached(
    key: str, values: tuple[float, ...], target: float, steps: int | None
) -> None:
    entry = Entry("one", 1, 1, True, records(1, 1, *values, key=key))
    there = Comparison([entry], target).reached(entry)
    assert (there.steps if there else None) == steps


def test_in_numbers() -> None:
    first, second = BOTH.rows()
    assert first == {
        "label": "bsp", "P": 1, "K": 4, "complete": True, "steps": 6, "samples": 48, "loss": 1 / 3,
        "accuracy": 0.8, "best_accuracy": 0.8, "seconds": 3.0, "bytes": 6e6,
        "steps_to_target": 4, "seconds_to_target": 2.0, "bytes_to_target": 4e6,
        "seconds_ratio": 1, "bytes_ratio": 1, "seconds_to_target_ratio": 1, "bytes_to_target_ratio": 1,
    }  # fmt: skip
    ratios = {name: value for name, value in second.items() if name.endswith("_ratio")}
    assert ratios == pytest.approx({
        "seconds_ratio": 1 / 3, "bytes_ratio": 0.4 / 6, "seconds_to_target_ratio": 0.5,
        "bytes_to_target_ratio": 0.1,
    })  # fmt: skip
    assert "steps_to_target" not in Comparison([BSP]).rows()[0]


def test_what_is_not_known() -> None:
    """Values are None if a run has no evaluation yet or did not reach the target."""
    begun = Entry("begun", 1, 1, False, records(1, 0, 0.5)[:1])
    row = Comparison([begun, BSP], target=0.9).rows()[0]
    unknown = ("accuracy", "best_accuracy", "loss", "steps_to_target", "bytes_to_target_ratio", "bytes_ratio")
    assert [row[name] for name in unknown] == [None] * len(unknown)


def test_written(tmp_path: Path) -> None:
    write_comparison(tmp_path, BOTH, ranks=4)
    told = json.loads((tmp_path / "compare.json").read_text())
    assert told == {"ranks": 4, "metric": "accuracy", "target": 0.7, "variants": BOTH.rows()}
    with (tmp_path / "compare.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["label"] for line in lines] == ["bsp", "local"]
    assert float(lines[1]["bytes_to_target"]) == 4e5


def test_the_table() -> None:
    head, bsp, local = (re.split(" {2,}", line.strip()) for line in comparison_text(BOTH).splitlines())
    spent = ["time", "ratio", "sent", "ratio"]
    assert head == ["P × K", "steps", "samples", "accuracy", "best", *spent, "steps to 0.7", *spent]
    whole, there = ["3 s", "1.00", "6 MB", "1.00"], ["2 s", "1.00", "4 MB", "1.00"]
    assert bsp == ["bsp", "1 × 4", "6", "48", "0.8000", "0.8000", *whole, "4", *there]
    assert local[:3] == ["local (unfinished)", "4 × 1", "4"]
    assert local[-5:] == ["4", "1 s", "0.50", "400 kB", "0.10"]
    assert len({len(line) for line in comparison_text(BOTH).splitlines()}) == 1


@pytest.mark.parametrize(
    ("comparison", "panels"),
    [
        (BOTH, ["steps", "seconds", "bytes"]),
        (Comparison([Entry("alone", 1, 1, True, records(1, 0, 0.5, 0.6))]), ["steps", "seconds"]),
    ],
)
def test_the_picture(
    comparison: Comparison, panels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def spy(figure: Figure, *arguments: object, **options: object) -> None:
        drawn.append(figure)
        save(figure, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", spy)
    plot_comparison(comparison, tmp_path / "compare.png")
    assert image.imread(tmp_path / "compare.png").std() > 0
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert titles == [f"test accuracy by {name}" for name in panels]
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == [entry.label for entry in comparison.entries]
    if comparison is BOTH:
        assert drawn[0].axes[2].get_xscale() == "log"
        lines = {line.get_label(): line for line in drawn[0].axes[2].get_lines()}
        assert list(lines["bsp"].get_xdata()) == [2e6, 4e6, 6e6]  # pyright: ignore[reportArgumentType]


def test_labels_may_have_dollar_signs(tmp_path: Path) -> None:
    """They are no formulas, which matplotlib would refuse."""
    plot_comparison(Comparison([replace(BSP, label="$_$"), LOCAL]), tmp_path / "compare.png")
    assert (tmp_path / "compare.png").exists()


def test_nothing_to_draw(tmp_path: Path) -> None:
    plot_comparison(Comparison([Entry("begun", 1, 1, False, [])]), tmp_path / "compare.png")
    assert list(tmp_path.iterdir()) == []
