"""Whole trainings by `hpcsgd train`, as a user starts them, for `selsync.py`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from harness import on_ranks
from harness.hosts import on_hosts

HPCSGD = Path(sys.executable).with_name("hpcsgd")
Launch = Callable[[Sequence[str]], None]
"""Starts `hpcsgd` with these words, with one rank per worker."""
BATCH = 32
"""Batch size of a worker, as in the paper."""


def here(ranks: int) -> Launch:
    """Return a function that starts `hpcsgd` on this machine."""
    return lambda words: on_ranks(ranks, HPCSGD, words, timeout=3600)


def on_shaped(name: str, hosts: int) -> Launch:
    """Return a function that starts `hpcsgd` with one rank on each host."""
    return lambda words: on_hosts(name, hosts, HPCSGD, words, timeout=3600)


def job(
    store: Path, method: Mapping[str, Any], groups: int, epochs: int, seed: int = 1, **data: Any
) -> dict[str, Any]:
    """Return the job of a CNN on MNIST, with the same learning rates for all methods.

    The rate falls to a tenth after 60 and 85 % of `steps`. If `steps` is not given, it falls after as many
    percent of the epochs.
    """
    workers, steps = data.pop("workers", groups), data.pop("steps", None)
    decay = {"name": "MultiStepLR", "interval": "step" if steps else "epoch", "scaling": "none"}
    milestones = [int(part * (steps or epochs)) for part in (0.6, 0.85)]
    return {
        "seed": seed,
        "parallel": {"groups": groups},
        "data": {"path": str(store), "group_batch_size": BATCH * workers // groups, **data},
        "model": {"name": "cnn", "arguments": {"shape": [1, 28, 28], "widths": [16, 32]}},
        "optimizer": {"lr": 0.05, "arguments": {"momentum": 0.9, "weight_decay": 5e-4}},
        "lr_schedule": {**decay, "arguments": {"milestones": milestones}},
        "method": dict(method),
        "training": {"epochs": epochs, "threads": 1},
    }


def train(launch: Launch, table: Mapping[str, Any]) -> dict[str, Any]:
    """Train, and return the summary with the curve of all evaluations."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(tomli_w.dumps(table))
        launch(["train", str(folder / "job.toml"), "--run.output_dir", f"{folder}/run"])
        summary = json.loads((folder / "run" / "summary.json").read_text())
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    kept = ("steps", "seconds", "accuracy", "lssr", "mean_staleness", "seconds_per_phase", "bytes_per_phase")
    return {**{key: summary[key] for key in kept}, "curve": curve(records)}


def curve(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """Return step, seconds of training until then, and accuracy of every evaluation."""
    points, seconds = [], 0.0
    for record in sorted(records, key=lambda record: (record["step"], record["kind"] != "step")):
        if record["kind"] == "step" and record["samples_per_s"]:
            seconds += record["samples"] / record["samples_per_s"]
        elif record["kind"] == "eval":
            points.append((record["step"], seconds, record["accuracy"]))
    return points
