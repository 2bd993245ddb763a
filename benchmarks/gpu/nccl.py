"""Groups of NCCL: made, used, aborted, timed out, and refused by one line before NCCL prints many."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.section import Found, Setting
from harness import Goal, mpiexec, print_table, programs
from hpcsgd.errors import PEER_LOST
from step_overhead import rows as steps

SCRIPT = Path(__file__).with_name("nccl_cases.py")
SHARED = "share a GPU"


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    code: int | None
    """The expected exit code; `None` stands for any but 0."""
    says: str
    gpu: bool = False
    """True if the expected text is not printed without a GPU."""


CASES = (
    Case("used", 1, 0, "made by"),
    Case("aborted", 1, 0, "done"),
    Case("timed_out", 1, PEER_LOST, "not done on the device within"),
    Case("sharded", 1, 0, "done"),
    Case("group_refused", 2, None, SHARED, gpu=True),
    Case("mesh_refused", 2, None, SHARED, gpu=True),
)
HEAD = ["case", "ranks", "code", "as it should be", "said"]


def measure(setting: Setting, found: Found) -> None:
    for case in CASES:
        if case.name == "timed_out" and setting.kind == "cpu":
            print("note: a CPU always comes to an end: timed_out is left out")
            continue
        row = outcome(case, setting)
        print_table([[row[key] for key in ("case", "ranks", "code", "right", "last")]], HEAD)
        if not row["right"]:
            print(row["said"])
        found.add(
            "case",
            [row],
            [Goal(f"groups of NCCL: {case.name} is not as it should be", float(not row["right"]), 0)],
        )
    count = torch.accelerator.device_count() if setting.on_gpu else 1
    if count > 1:
        rows, _ = steps.measured(
            count, setting.of(16, 3, 1), setting.of(20, 2, 1), timeout=setting.seconds, device=setting.kind
        )
        found.show("step", rows, steps.HEAD, list(map(steps.cells, rows)), steps.goals(rows))


def outcome(case: Case, setting: Setting) -> dict[str, Any]:
    launcher = [] if case.ranks == 1 else [mpiexec(), "-n", str(case.ranks)]
    command = [*launcher, sys.executable, "-P", str(SCRIPT), case.name, setting.kind]
    try:
        done = programs.run(command, timeout=setting.seconds * 0.6, check=False)
        code, said = done.returncode, done.stdout + done.stderr
    except programs.Failed as late:
        code, said = None, str(late)
    lines = [line for line in said.splitlines() if line.startswith("hpcsgd: ")] or said.splitlines()[-1:]
    right = code is not None and (code == case.code if case.code is not None else code != 0)
    if not (case.gpu and not setting.on_gpu):
        right = right and case.says in said
    if case.code is None:
        right = right and len(lines) == 1 and "Traceback" not in said
    return {
        "case": case.name,
        "ranks": case.ranks,
        "code": code,
        "right": right,
        "last": "; ".join(lines),
        "said": said,
    }
