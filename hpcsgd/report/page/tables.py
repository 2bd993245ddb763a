"""The tables of the page: figures, differences between runs, starts, and values that are not numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsgd.report import replica_groups
from hpcsgd.report.figures import FIGURES
from hpcsgd.report.page.runs import Run
from hpcsgd.report.summary import byte_text, flop_text, second_text

Text = Callable[[Any], str]
NOTHING = "–"
ALWAYS_OTHER = ("started", "command", "working_directory")
"""Facts about a start that always differ between starts, so that the differences are not marked."""
FIGURE_TEXTS: Mapping[str, tuple[str, Text]] = {
    "steps": ("steps", "{:,}".format),
    "epochs": ("epochs", "{:,}".format),
    "samples": ("samples", "{:,}".format),
    "training_loss": ("training loss", "{:.4g}".format),
    "loss": ("test loss", "{:.4g}".format),
    **{
        name: (f"{word}{figure.name}", figure.text)
        for key, figure in FIGURES.items()
        for name, word in ((key, ""), (f"best_{key}", "best "))
    },
    "best_epoch": ("best after epoch", "{:,}".format),
    "model_averages": ("synchronizations", "{:,}".format),
    "median_distance": ("median D", "{:.3g}".format),
    "distance": ("D at the last test", "{:.3g}".format),
    "lssr": ("LSSR", "{:.1%}".format),
    "rounds": ("elastic rounds", "{:,}".format),
    "groups_lost": ("replica groups lost", "{:,}".format),
    "groups_returned": ("replica groups returned", "{:,}".format),
    "groups_left": ("replica groups left", "{:,}".format),
    "groups_late": ("replica groups late", "{:,}".format),
    "mean_density": ("density", "{:.3%}".format),
    "mean_staleness": ("staleness", "{:.2f}".format),
    "mean_ahead": ("steps ahead", "{:.2f}".format),
    "gradient_norm": ("last norm of the gradient", "{:.3g}".format),
    "seconds": ("time", second_text),
    "bytes": ("sent by rank 0", byte_text),
    "samples_per_s": ("samples/s", "{:,.0f}".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "flops": ("model's work", flop_text),
    "utilization": ("of the peak", "{:.1%}".format),
}
"""For each key of a summary that is shown: the name of the figure, and the function that formats it."""
NOT_IF_ZERO = ("distance", "bytes", "model_averages", "groups_late")
RATIOS = ("seconds", "bytes")
"""Figures that are also shown as a ratio to the first run's."""


@dataclass(frozen=True)
class Row:
    """One row of a table: the name of a quantity, and its value in each run."""

    name: str
    values: Sequence[str]
    differs: bool = False

    @property
    def same(self) -> bool:
        return len(set(self.values)) == 1


def figures(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of the table of figures: one for each figure that at least one run has."""
    numbers = list(map(_numbers, runs))
    rows = [Row("state", [run.state for run in runs]), Row("P × K", [run.shape for run in runs])]
    for key, (name, text) in FIGURE_TEXTS.items():
        values = [found.get(key) for found in numbers]
        if any(value is not None and (value or key not in NOT_IF_ZERO) for value in values):
            rows.append(Row(name, [NOTHING if value is None else text(value) for value in values]))
            if key in RATIOS and len(runs) > 1:
                first = values[0]
                rows.append(Row("ratio", [f"{value / first:.2f}" if first else NOTHING for value in values]))
    return rows


def _numbers(run: Run) -> dict[str, Any]:
    numbers = run.reading.totals.numbers() | {"bytes": run.reading.totals.bytes}
    return numbers | replica_groups.numbers(run.events, run.samples, numbers["seconds"])


def differences(tables: Sequence[Mapping[str, Any]], *, but: Sequence[str] = ()) -> list[Row]:
    """Return a row for each key of the tables. Rows with different values are marked, except keys `but`."""
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [_text(table[key]) if key in table else NOTHING for table in tables]
        rows.append(Row(key, values, len(set(values)) > 1 and key not in but))
    return rows


def environment(runs: Sequence[Run]) -> list[Row]:
    return differences([run.environment for run in runs], but=ALWAYS_OTHER)


def configuration(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of the configurations. The output folder always differs and is not marked."""
    return differences([run.config for run in runs], but=("run.output_dir",))


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return NOTHING if value is None else str(value)


def starts(run: Run) -> list[list[str]]:
    """Return a list of cells for each start of the run, with the columns of `START_HEAD`."""
    lines = []
    for number, (attempt, redone) in enumerate(
        zip(run.timeline.attempts, run.timeline.redone(), strict=True), start=1
    ):
        about = attempt.about
        where = [f"{about['P']} × {about['K']}"] if {"P", "K"} <= about.keys() else [NOTHING]
        lines.append(
            [
                str(number),
                f"{attempt.started:%Y-%m-%d %H:%M:%S}",
                f"{attempt.ended:%Y-%m-%d %H:%M:%S}",
                f"{attempt.first_step:,} → {attempt.last_step:,}",
                f"{redone:,}" if redone else NOTHING,
                *where,
                _text(about.get("host")),
                attempt.end,
            ]
        )
    return lines


START_HEAD = ("start", "from (UTC)", "last word (UTC)", "steps", "made again", "P × K", "host", "end")


def words(run: Run) -> list[Row]:
    """Return a row for each field with values that are not numbers: these values and their counts."""
    return [
        Row(f"{name} ({kind})", [", ".join(f"{text} ({n:,} ×)" for text, n in found.items())])
        for (kind, name), found in run.reading.words.items()
    ]
