"""A mistake before `init` ends a script like one after it: on all ranks, and with one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import programs

MISTAKES = {
    "a method": (
        "hpcsgd.hierarchical(sync_every='8')",
        "hierarchical: sync_every = '8': expected a whole number",
    ),
    "init": ("hpcsgd.init(groups='4')", "init: groups = '4': expected a whole number or None"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("call", "line"), MISTAKES.values(), ids=list(MISTAKES))
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mistake_before_the_start_is_one_line(tmp_path: Path, ranks: int, call: str, line: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import hpcsgd\n{call}\n")
    launcher = [programs.mpiexec(), "-n", str(ranks)] if ranks > 1 else []
    done = programs.run([*launcher, sys.executable, script], check=False)
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert [x for x in told.splitlines() if line in x] == [
        f"hpcsgd: {'rank 0: ' if ranks > 1 else ''}{line}: did you mean {'8' if '8' in line else '4'}?"
    ]
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2])
def test_so_is_that_of_one_rank_alone(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "script.py"
    lines = ["import os, hpcsgd", "last = os.environ.get('PMI_RANK') == '1'"]
    lines += ["hpcsgd.hierarchical(sync_every='8' if last else 8)", "hpcsgd.init()"]
    script.write_text("\n".join(lines) + "\n")
    done = programs.run([programs.mpiexec(), "-n", str(ranks), sys.executable, script], check=False)
    assert done.returncode != 0
    assert "rank 1: hierarchical: sync_every = '8': expected a whole number" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_other_faults_keep_their_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import hpcsgd\n1 / 0\n")
    done = programs.run([sys.executable, script], check=False)
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr
