"""Run folders with invented numbers, as training would write them, and a parser for the report page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

STEPS, EVERY = 60, 4
PHASES = ("compute", "grad_reduce", "model_average")
Record = dict[str, Any]


def records(steps: int = STEPS, seed: int = 0, first: int = 0) -> list[Record]:
    """Return step records every `EVERY` steps, synchronizations, and metrics of an unknown method."""
    draw = np.random.default_rng(seed)
    found: list[Record] = []
    for step in range(first + 1, steps + 1):
        if step % 6 == 0:
            found.append({"kind": "sync", "step": step, "distance": float(draw.random())})
        found.append({"kind": "method", "step": step, "wobble": float(draw.normal()), "density": 0.01})
        if step % EVERY == 0:
            seconds = {phase: float(draw.random()) for phase in PHASES}
            sizes = {"grad_reduce": float(draw.integers(1000)), "model_average": float(draw.integers(1000))}
            speed = {"samples": 128, "samples_per_s": float(100 + draw.integers(50))}
            counts = {"counts": {"staleness": {"0": 3, "2": int(draw.integers(1, 5))}}}
            place = {"kind": "step", "step": step, "epoch": 1 + step // 20}
            values = {"loss": float(3 / step + 0.1 * draw.random()), "lr": 0.1}
            found.append(
                {**place, **values, **speed, "phase_seconds": seconds, "phase_bytes": sizes, **counts}
            )
        if step % 20 == 0:
            score = {"loss": float(draw.random()), "accuracy": float(draw.random()), "distance": 0.5}
            found.append({"kind": "eval", "step": step, "epoch": step // 20, **score, "seconds": 0.1})
    return found


def lines(found: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in found)


START = {
    "started": "2026-01-05T10:00:00+00:00",
    "command": ["hpcsgd", "train", "job.toml"],
    "P": 2,
    "K": 3,
    "packages": {"torch": "2.99"},
    "host": "node7",
    "git": None,
}
JOB = {"seed": 1, "optimizer": {"lr": 0.1}, "method": {"name": "hierarchical", "sync_every": 6}}
LOG = """\
2026-01-05 12:00:00,500 INFO    2 groups of 3 ranks, 20 steps an epoch
2026-01-05 12:00:30,000 INFO    epoch 3/3  step 60/60  loss 0.1  lr 0.1  100 samples/s  eta 0:00:00
2026-01-05 12:00:31,000 INFO    trained   60 steps, 3 epochs, 1,920 samples in 0:00:16
written   somewhere
"""
"""A log in local time, which is two hours ahead of UTC."""


def run(folder: Path, found: Iterable[Record] | None = None, *, log: str = LOG, **job: Any) -> Path:
    """Write the folder of a complete run; `job` has sections that replace those of `JOB`."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(lines(records() if found is None else found))
    (folder / "versions.json").write_text(json.dumps([START]))
    (folder / "run.log").write_text(log)
    (folder / "job.toml").write_text(tomli_w.dumps(JOB | job))
    return folder


@dataclass
class Page:
    """The content of a report file, parsed without code of hpcsgd."""

    text: str
    data: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.text, re.DOTALL)
        assert inside
        self.data = json.loads(inside[1])

    @property
    def tiles(self) -> dict[str, str]:
        return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", self.text))

    def panel(self, title: str) -> dict[str, Any]:
        found = [panel for panel in self.data["panels"] if panel["title"] == title]
        assert len(found) == 1, [panel["title"] for panel in self.data["panels"]]
        return found[0]

    def rows(self, heading: str) -> dict[str, list[str]]:
        """Return the rows of the table after a heading, by their first cell."""
        table = self.text.split(f"<h2>{heading}</h2>", 1)[1].split("</table>", 1)[0]
        found = {}
        for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL):
            name, *cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            name, *cells = (html.unescape(re.sub(r"<.*?>", "", cell)) for cell in (name, *cells))
            found[name] = cells
        return found

    def marked(self) -> set[str]:
        """Return the keys whose rows are highlighted."""
        return set(re.findall(r'<tr class="differs"><th>(.*?)</th>', self.text))

    @property
    def elements(self) -> list[tuple[str, dict[str, str | None]]]:
        reader = _Elements()
        reader.feed(self.text)
        return reader.found


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
