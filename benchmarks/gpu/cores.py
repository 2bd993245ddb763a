"""Steps and messages of ranks that have a core each, to compare with the same benchmarks on two cores."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu.section import Found, Setting
from harness import Goal, programs
from harness.hosts import SCRIPTS
from harness.launching import BENCHMARKS
from step_overhead import rows as steps

COUNTS = (4, 8, 16)
MESSAGES = "alpha_beta.py"
ON_HOSTS = (
    ["step_time.py", "--quick"],
    ["strong_scaling.py", "--ranks", "1", "4", "8", "16", "--rounds", "1"],
)


def measure(setting: Setting, found: Found) -> None:
    cores = len(os.sched_getaffinity(0))
    counts = [1, *(count for count in COUNTS if count <= cores)] if not setting.rehearse else [1, 2]
    rounds, block = setting.of((8, 3), (3, 2), (1, 1))
    for count in counts:
        rows, _ = steps.measured(count, rounds, block, timeout=setting.seconds * 0.4)
        found.show("step", rows, steps.HEAD, list(map(steps.cells, rows)), steps.goals(rows))
    found_by([MESSAGES, "--quick"], setting, found)
    if why := _no_hosts():
        print(f"note: no hosts with slow links: {why}")
        return
    for words in ON_HOSTS if not setting.rehearse else (["strong_scaling.py", "--quick"],):
        found_by(words, setting, found)


def found_by(words: list[str], setting: Setting, found: Found) -> None:
    """Run another benchmark, and add its rows and goals."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, str(BENCHMARKS / words[0]), *words[1:], "--json", str(file)]
        programs.run(command, timeout=setting.seconds * 0.5, capture=False, check=False)
        told: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": [], "goals": []}
    goals = [Goal(goal["name"], goal["value"], goal["goal"]) for goal in told["goals"]]
    found.add(words[0], told["rows"], goals)


def _no_hosts() -> str:
    """Return why no network namespaces with shaped links can be made here, or "" if they can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "they need root and iproute2"
    name = f"hpcsgd-try-{os.getpid()}"
    try:
        made = programs.run([SCRIPTS / "net-up.sh", name, "2", "100mbit", "32kb"], timeout=60, check=False)
        return "" if made.returncode == 0 else made.stderr.strip()[-200:]
    finally:
        programs.run([SCRIPTS / "net-down.sh", name, "2"], timeout=60, check=False)
