"""The page about Lightning shows a part of its script, which trains and resumes."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import programs
from lightning_runs import by_mpiexec, by_torchrun
from train.launches import unlaunched

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/lightning_digits.py"
SHOWN = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOUND = re.compile(r"^(\d+) steps: accuracy of the averaged model (0\.\d+)$", re.MULTILINE)
LEAST = 0.85


def test_the_page_shows_a_part_of_the_script() -> None:
    (shown,) = SHOWN.findall((ROOT / "docs/lightning.md").read_text())
    assert textwrap.indent(shown, 4 * " ") in SCRIPT.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("by", [by_mpiexec, pytest.param(by_torchrun, marks=pytest.mark.long)])
def test_the_script_trains_and_resumes(by: Callable[..., list[str]], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    shutil.copy(SCRIPT, script)
    (steps, accuracy), *others = FOUND.findall(
        programs.run(by([str(script)]), cwd=tmp_path, env=unlaunched()).stdout
    )
    assert not others
    assert steps == "110"  # 5 epochs of 22 batches
    assert float(accuracy) > LEAST
    script.write_text(script.read_text().replace("EPOCHS = 5", "EPOCHS = 6"))
    done = programs.run(by([str(script)]), cwd=tmp_path, env=unlaunched())
    assert [steps for steps, _ in FOUND.findall(done.stdout)] == ["132"]
    assert "last.ckpt" in done.stderr
