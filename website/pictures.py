"""Train the digits by each method, on four groups of one rank, and draw docs/training/METHOD.png.

python website/pictures.py             # all methods; takes a few minutes on two cores
python website/pictures.py sgp ssp     # only these methods
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcsgd.data import convert
from hpcsgd.files.pictures import BLUE, GREEN, GREY, ORANGE, STYLE, save
from hpcsgd.methods import METHODS
from hpcsgd.report.metrics import Record, read
from public_names import needed
from repository import ROOT

FOLDER = ROOT / "docs/training"
Points = Sequence[tuple[float, float]]
GROUPS, BATCH, EPOCHS = 4, 16, 6
REFERENCE = "bsp"
SYNC = {"name": "hierarchical", "sync_every": 8}
GIVEN: Mapping[str, Any] = {
    "adapt_every": 22, "at": 66, "delta": 0.1, "first": {"name": "bsp"}, "fraction": 0.5,
    "initial_sync_every": 8, "max_staleness": 4, "num_fragments": 4, "per_epoch": 3,
    "sync_delay": 2, "sync_every": 8, "then": SYNC,
    "method": SYNC,
}  # fmt: skip
"""Values for the methods' arguments without a default, as in a job file. The run sets `steps_per_epoch`."""
CALM = {"name": "piecewise", "lr": [[0, 0.7]], "momentum": [[0, 0.8]]}
"""An outer schedule for few synchronizations; the schedules of papers are for hundreds of them."""
OWN: Mapping[str, Mapping[str, Any]] = {
    "osgp": {"overlap_steps": 1},
    "pier": {"lazy_fraction": 0.25, "outer_schedule": CALM},
}
"""Further arguments of single methods, where the values above and the defaults do not suit."""
PLAIN = ("sasgd",)
"""Methods that need SGD without momentum and weight decay."""
SIZE, DPI = (7.0, 2.3), 80


def job(name: str, data_file: Path) -> dict[str, Any]:
    """Return the job file of a training by the method `name`."""
    table = tomllib.loads((ROOT / "examples/digits.toml").read_text())
    arguments = {x: GIVEN[x] for x in needed(METHODS[name]) if x in GIVEN}
    table["method"] = {"name": name, **arguments, **OWN.get(name, {})}
    table["parallel"]["groups"] = GROUPS
    table["data"] |= {"path": str(data_file), "group_batch_size": BATCH}
    table["lr_schedule"] |= {"scaling": "none", "warmup_epochs": 0, "arguments": {"T_max": EPOCHS}}
    table["training"] = {"epochs": EPOCHS, "log_every": 4}
    if name in PLAIN:
        del table["optimizer"]["arguments"]
    return table


def trained(name: str, folder: Path) -> Sequence[Record]:
    """Train by the method `name` in `folder`, which has the dataset file, and return the run's metrics."""
    file, run = folder / f"{name}.toml", folder / name
    file.write_text(tomli_w.dumps(job(name, folder / "digits.h5")))
    hpcsgd = [sys.executable, "-m", "hpcsgd"]
    here = Path(sys.executable).with_name("mpiexec")
    start = (
        [*hpcsgd, "launch"] if name == "ensemble_sync" else [str(here), "-n", str(GROUPS), *hpcsgd, "train"]
    )
    subprocess.run([*start, str(file), "--run.output_dir", str(run)], check=True, stdin=subprocess.DEVNULL)
    told = run if (run / "metrics.jsonl").exists() else run / "replica_groups" / "0"
    return read(told / "metrics.jsonl")


def draw(name: str, records: Sequence[Record], reference: Sequence[Record], target: Path) -> None:
    """Draw the training loss, the test accuracy and the distance of the groups, each by steps.

    The reference's curves of loss and accuracy are grey.
    """
    with rc_context({**STYLE, "font.size": 8}):
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        loss, distance, accuracy = figure.subplots(1, 3)
        for some, colour in ((reference, GREY), (records, None)):
            _line(loss, _of(some, "step", "loss"), colour or BLUE, "training loss")
            _line(accuracy, _of(some, "eval", "accuracy"), colour or GREEN, "test accuracy", ".")
        found = _of(records, "sync", "distance") or _of(records, "eval", "distance")
        _line(distance, found, ORANGE, "distance of the groups", ".")
        loss.set_yscale("log")
        target.parent.mkdir(exist_ok=True)
        save(figure, target)


def _of(records: Sequence[Record], kind: str, key: str) -> Points:
    return [(r["step"], r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]


def _line(axes: Axes, points: Points, colour: str, title: str, marker: str = "") -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker, linewidth=1)
    axes.set(title=title, xlabel="step")


def main(names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        convert("digits", None, folder / "digits.h5")
        reference = trained(REFERENCE, folder)
        for name in names or METHODS:
            records = reference if name == REFERENCE else trained(name, folder)
            draw(name, records, reference, FOLDER / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
