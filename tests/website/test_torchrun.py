"""The first commands of the page about torchrun train, as they are written."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import programs
from pythons import python
from train.launches import unlaunched

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATIENCE = 400.0
"""Seconds that a test may take; its processes import torch, and the machine may be busy."""
TRAINED = {
    "torchrun --nproc-per-node 4 examples/train.py": r"accuracy",
    "torchrun --nproc-per-node 4 -m hpcsgd train examples/digits.toml": r"trained",
}
"""What each command prints."""
DATA = "hpcsgd data convert digits examples/digits.h5"


def commands() -> list[str]:
    return BLOCK.findall((ROOT / "docs/torchrun.md").read_text())[0].splitlines()


def test_the_first_block_has_these_commands() -> None:
    script, job = TRAINED
    assert commands() == ['pip install -e ".[examples]"', script, DATA, job]


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 100)
@pytest.mark.parametrize("command", TRAINED)
def test_the_commands_train(command: str, tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    for name in ("train.py", "digits.toml"):
        shutil.copy(ROOT / "examples" / name, tmp_path / "examples")
    programs.run(python("-m", *shlex.split(DATA)), cwd=tmp_path)
    agent, *rest = shlex.split(command)
    assert agent == "torchrun"
    command_line = python("-m", "torch.distributed.run", *rest)
    done = programs.run(command_line, cwd=tmp_path, env=unlaunched(), timeout=PATIENCE)
    assert re.search(TRAINED[command], done.stdout + done.stderr)
