"""Benchmarks are where they are expected, and all of them start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import programs
from program_starts import program_starts
from pythons import python

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAPERS = ("hierarchical", "selsync", "ensemblesync", "deft", "sgp")
ENTRIES = [
    *sorted(path.name for path in BENCHMARKS.glob("*.py")),
    *(f"papers/{name}.py" for name in PAPERS if (BENCHMARKS / f"papers/{name}.py").exists()),
]
START = """
import contextlib, io, runpy, sys

_, *scripts = sys.argv
for script in scripts:
    said = io.StringIO()
    sys.argv, sys.path[0] = [script, "--help"], script.rpartition("/")[0]
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(script, end.code, "--quick" in said.getvalue(), file=sys.stderr)
"""
COMMAND = re.compile(r"benchmarks/[\w/]+\.py")


def timing_by_themselves(benchmarks: Path) -> list[str]:
    """Return the files outside the harness that read the clock."""
    paths = [path.relative_to(benchmarks) for path in sorted(benchmarks.rglob("*.py"))]
    others = [path for path in paths if path.parts[0] != "harness"]
    return [str(path) for path in others if "perf_counter" in (benchmarks / path).read_text()]


def test_the_harness_alone_times():
    assert timing_by_themselves(BENCHMARKS) == []


def test_who_times_beside_it_is_found(tmp_path):
    for name in ("harness/timing.py", "gossip/rank.py", "density.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("from time import perf_counter\n")
    assert timing_by_themselves(tmp_path) == ["density.py", "gossip/rank.py"]


def starting_by_themselves(benchmarks: Path) -> list[str]:
    """Return the lines that start programs, except in the harness's one file for that."""
    paths = [path.relative_to(benchmarks) for path in sorted(benchmarks.rglob("*.py"))]
    others = [path for path in paths if path != Path("harness/programs.py")]
    return [
        f"{path}:{line}: {what}" for path in others for line, what, _ in program_starts(benchmarks / path)
    ]


def test_one_place_starts_programs():
    assert starting_by_themselves(BENCHMARKS) == []


def test_who_starts_programs_beside_it_is_found(tmp_path):
    texts = {
        "harness/programs.py": "import subprocess\nsubprocess.run(['a'])\n",
        "harness/hosts.py": "import subprocess\n\ndef up():\n    return subprocess.Popen(['a']).pid\n",
        "density.py": "import subprocess\ntext = 'subprocess.run()'  # subprocess.run()\nsubprocess.PIPE\n",
        "gossip.py": "from subprocess import PIPE, check_output\n",
        "muon.py": "from harness import programs\nprograms.run(['a'], timeout=1)\n",
        "wire.py": "import os\nos.system('a')\n",
    }
    (tmp_path / "harness").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert starting_by_themselves(tmp_path) == [
        "gossip.py:1: subprocess.check_output",
        "harness/hosts.py:4: subprocess.Popen",
        "wire.py:2: os.system",
    ]


def test_all_commands_that_are_named_are_there():
    pages = ("README.md", "Makefile", "CHANGELOG.md", "benchmarks/README.md")
    texts = [*(ROOT / page for page in pages), *ROOT.glob("docs/*.md")]
    named = {found for path in texts for found in COMMAND.findall(path.read_text())}
    results = [json.loads(path.read_text()) for path in BENCHMARKS.glob("results/**/*.json")]
    named |= {result["command"][1] for result in results}
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.slow
def test_all_of_them_start(tmp_path):
    """They start from any folder. One process starts all, so that it imports shared modules only once."""
    (tmp_path / "start.py").write_text(START)
    command = python(str(tmp_path / "start.py"), *(str(BENCHMARKS / name) for name in ENTRIES))
    done = programs.run(command, cwd="/")
    said = dict(line.split(" ", 1) for line in done.stderr.splitlines())
    assert said == {str(BENCHMARKS / name): "0 True" for name in ENTRIES}
