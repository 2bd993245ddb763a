"""The page for newcomers, typed as it stands into an empty folder with the examples in it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import programs

PATIENCE = 600.0  # seconds; the machine may be busy
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""What installs is a block of bash."""


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
def test_every_command_of_the_first_five_minutes(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("*.h5"))
    blocks = BLOCK.findall((ROOT / "docs/start.md").read_text())
    assert len(blocks) == 7
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euc", "\n".join(blocks)]
    done = programs.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=PATIENCE)
    assert (tmp_path / "runs/four-groups/model.pt").exists()
    assert (tmp_path / "runs/mine/curves.png").exists()
    assert "2 groups of 2: test accuracy 0.9" in done.stdout
    assert done.stdout.count("next      mpiexec -n 4 hpcsgd train mine.toml") == 1
    accuracy = re.findall(r"^test      accuracy ([\d.]+)", done.stdout, re.MULTILINE)
    assert float(accuracy[-1]) > 0.8
    assert torch.load(tmp_path / "runs/mine/model.pt")["0.weight"].shape == (96, 20)
