"""Build the CUDA kernels for this GPU, run all their tests, and run a quick case under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from gpu.pytests import ROOT, tested
from gpu.section import TESTS, Found, Setting
from harness import Goal, programs
from hpcsgd import kernels
from hpcsgd.kernels.cuda import FILE

TOOLS = {"memcheck": ["--report-api-errors=no"], "racecheck": []}
"""Options of each tool. Torch makes CUDA calls that may fail, which are not findings."""
TESTED = "tests/kernels/test_cuda.py"
ON_GPU = ["-k", "not cpu and not without_a_gpu", "-n", "4"]
"""The options leave out the tests for machines without a GPU, because those have run on such machines."""
ONE_CASE = ["-k", "small_arrays and cpu and normal"]
FINDING = 86
"""The code with which compute-sanitizer exits if it finds something."""


def measure(setting: Setting, found: Found) -> None:
    if setting.on_gpu:
        found.add(
            "library", [library(setting)], [Goal("the CUDA kernels are not built", _lacking(setting), 0)]
        )
    tests = tested([TESTED, *(ON_GPU if setting.on_gpu else ONE_CASE)], setting.seconds * 0.5, 1)
    tests.print()
    found.add("tests", [tests.row()], tests.goals(TESTED))
    for tool in TOOLS if setting.on_gpu else ("none",):
        row = sanitized(tool, setting)
        print(row["said"])
        found.add("sanitizer", [row], [Goal(f"compute-sanitizer {tool}: findings", row["code"], 0)])


def library(setting: Setting) -> dict[str, Any]:
    """Return which machine code is in the library."""
    cuobjdump = shutil.which("cuobjdump")
    listed = [] if cuobjdump is None else [cuobjdump, "--list-elf", FILE]
    said = programs.run(listed, timeout=60, check=False).stdout.split() if listed and FILE.exists() else []
    row = {"file": str(FILE.relative_to(ROOT)), "loads": str(kernels.cuda(setting.device)), "code": said}
    print(row)
    return row


def _lacking(setting: Setting) -> float:
    return float(kernels.cuda(setting.device) is None)


def sanitized(tool: str, setting: Setting) -> dict[str, Any]:
    """Run a few cases that reach every line of the kernels; without a GPU the kernels run on the CPU."""
    trial = [sys.executable, "-m", "kernels.cuda_trial"]
    if tool == "none":
        command = [*trial, "cpu", "1"]
    else:
        checker = shutil.which("compute-sanitizer")
        if checker is None:
            return {"tool": tool, "code": 1, "said": "no compute-sanitizer in PATH"}
        options = [f"--tool={tool}", f"--error-exitcode={FINDING}", "--print-limit=20", *TOOLS[tool]]
        command = [checker, *options, *trial, "gpu", "1"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # the memory of each tensor then ends where the tensor ends
    }
    try:
        done = programs.run(command, env=environment, timeout=setting.seconds * 0.35, check=False)
    except programs.Failed as late:
        return {"tool": tool, "code": 1, "said": str(late)}
    return {"tool": tool, "code": done.returncode, "said": (done.stdout + done.stderr)[-programs.TAIL :]}
