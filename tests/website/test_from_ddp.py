"""The page for users of DDP shows how its two scripts differ, and both train."""

from __future__ import annotations

import difflib
import re
import shutil
from pathlib import Path

import pytest

import hpcsgd
import programs
from launchers import Launcher, by_each_launcher, by_torchrun
from train.launches import unlaunched

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/from_ddp"
SHOWN = re.compile(r"^```diff\n(.*?)\n^```", re.MULTILINE | re.DOTALL)
ACCURACY = re.compile(r"^epoch (\d): accuracy (0\.\d+)$", re.MULTILINE)
LEAST = 0.75
"""The least accuracy after four epochs; that of an untrained model is 0.1."""


def test_the_page_shows_the_difference() -> None:
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("before.py", "after.py"))
    lines = difflib.unified_diff(before, after, "before.py", "after.py", n=1, lineterm="")
    assert SHOWN.findall((ROOT / "docs/from-ddp.md").read_text()) == ["\n".join(lines)]


def test_the_page_says_which_name_the_error_about_join_has() -> None:
    page = (ROOT / "docs/from-ddp.md").read_text()
    (name,) = re.findall(
        r"^\| `model\.join\(\)`.*no `hpcsgd\.join`: its error names `(\w+)`", page, re.MULTILINE
    )
    with pytest.raises(AttributeError, match=f"'join'; use '{name}' instead"):
        getattr(hpcsgd, "join")  # noqa: B009 - type checkers know that it is not there


def trained(command: list[str], folder: Path) -> list[tuple[str, str]]:
    return ACCURACY.findall(programs.run(command, cwd=folder, env=unlaunched()).stdout)


@pytest.mark.slow
@by_each_launcher
def test_the_script_trains_and_resumes(by: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "after.py"
    shutil.copy(EXAMPLES / "after.py", script)
    found = trained(by(script), tmp_path)
    assert [epoch for epoch, _ in found] == ["1", "2", "3", "4"]
    assert float(found[-1][1]) > LEAST
    script.write_text(script.read_text().replace("EPOCHS = 4", "EPOCHS = 6"))
    assert [epoch for epoch, _ in trained(by(script), tmp_path)] == ["5", "6"]


@pytest.mark.long
def test_the_script_for_ddp_trains(tmp_path: Path) -> None:
    found = trained(by_torchrun(EXAMPLES / "before.py", n=2), tmp_path)
    assert float(found[-1][1]) > LEAST
