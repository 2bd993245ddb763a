"""One section of `gpu.py`, in a process of its own: `python section.py NAME …`.

Results are written to a file as soon as they are found.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness import Goal, print_table
from harness.launching import BENCHMARKS
from harness.record import print_goals

TESTS = BENCHMARKS.parent / "tests"
FAR = "far"
"""The kind of the test device, tests/far."""


@dataclass(frozen=True)
class Setting:
    """The settings of a section."""

    kind: str
    """The kind of device: "cuda" and the like, `FAR`, or "cpu"."""
    quick: bool
    """True for few sizes and rounds."""
    rehearse: bool
    """True for tiny sizes, to check that every line runs."""
    seconds: float
    """Number of seconds after which this process is killed."""
    folder: Path
    """Folder for pictures."""

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, 0)

    @property
    def on_gpu(self) -> bool:
        """True for a real GPU of NVIDIA or AMD, not an emulated one."""
        return self.kind == "cuda"

    def of(self, full: Any, quick: Any, rehearsed: Any) -> Any:
        """Return the value for the current mode."""
        return rehearsed if self.rehearse else quick if self.quick else full


@dataclass
class Found:
    """Rows and goals of a section, which are written to `file` as soon as they are known."""

    file: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def add(self, part: str, rows: Sequence[dict[str, Any]], goals: Sequence[Goal] = ()) -> None:
        self.rows += [{"part": part, **row} for row in rows]
        self.goals += goals
        print_goals(goals)
        goals_as_json = [{**asdict(goal), "met": goal.met} for goal in self.goals]
        self.file.write_text(json.dumps({"rows": self.rows, "goals": goals_as_json}, indent=1, default=str))
        sys.stdout.flush()

    def show(
        self,
        part: str,
        rows: Sequence[dict[str, Any]],
        head: Sequence[str],
        cells: Sequence[Sequence[object]],
        goals: Sequence[Goal] = (),
    ) -> None:
        """Add rows and goals like `add`, and print a table."""
        print_table(cells, head)
        self.add(part, rows, goals)


@contextlib.contextmanager
def device_switched_on(kind: str) -> Iterator[None]:
    """Make the test device this process's accelerator if `kind` is `FAR`."""
    if kind != FAR:
        yield
        return
    far = test_device()
    far.prepare()
    with far.switched_on():
        yield


def test_device() -> Any:
    """Import the package `far` of the tests."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return importlib.import_module("far")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    given = vars(parser.parse_args())
    name, file = given.pop("name"), given.pop("file")
    setting = Setting(**given)
    with device_switched_on(setting.kind):
        importlib.import_module(f"gpu.{name}").measure(setting, Found(file))


if __name__ == "__main__":
    main()
