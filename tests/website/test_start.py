"""The commands on the page for newcomers work as written in an empty folder with the examples."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import programs
from pythons import python

PATIENCE = 600.0  # seconds; the machine may be busy
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""Matches the blocks of commands; those that install are blocks of bash and do not match."""


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


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
def test_a_script_with_the_loop_of_the_page_resumes(tmp_path: Path) -> None:
    """A script killed after its third epoch resumes, and ends with the model of an uninterrupted run."""
    resumed, whole = _script(tmp_path / "killed"), _script(tmp_path / "whole")
    (resumed / "stop").touch()
    command = [programs.mpiexec(), "-n", "4", *python("train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = programs.run(command, cwd=resumed, env=environment, check=False)
    assert killed.returncode != 0
    (resumed / "stop").unlink()
    done = [programs.run(command, cwd=folder, env=environment) for folder in (resumed, whole)]
    assert done[0].stdout == done[1].stdout
    assert re.fullmatch(r"2 groups of 2: test accuracy 0\.9\d+\n", done[0].stdout)
    ours, theirs = (torch.load(folder / "model.pt") for folder in (resumed, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert len([*(resumed / "checkpoints").iterdir()]) == 2


def _script(folder: Path) -> Path:
    """Write the example with the loop and the end of the page; if a file `stop` exists, rank 2 dies."""
    section = (ROOT / "docs/start.md").read_text().split("### Save and resume in a script")[1]
    loop, end = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    example = (ROOT / "examples/train.py").read_text()
    begin, rest = example.split("    for epoch in range(10):\n")
    rest, main = rest[rest.index("    with optimizer.averaged_model()") :].split("\n\nif __name__")
    assert loop.count("    scheduler.step()\n") == 1
    dies = "    if epoch == 3 and topology.rank == 2 and os.path.exists('stop'):\n"
    dies += "        os.kill(os.getpid(), 9)\n"
    loop = loop.replace("    scheduler.step()\n", f"    scheduler.step()\n{dies}")
    folder.mkdir()
    loop, end = (textwrap.indent(text, "    ") for text in (loop, end))
    (folder / "train.py").write_text(f"import os\n{begin}{loop}{rest}{end}\n\nif __name__{main}")
    return folder
