"""The launchers by which tests start the scripts of pages: mpiexec, and torchrun in `make test-long`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import programs
from pythons import python

Launcher = Callable[[str | Path], list[str]]


def by_mpiexec(script: str | Path, n: int = 4) -> list[str]:
    return [programs.mpiexec(), "-n", str(n), *python(str(script))]


def by_torchrun(script: str | Path, n: int = 4) -> list[str]:
    agent = ["--standalone", "--nproc-per-node", str(n), "--no-python", *python(str(script))]
    return python("-m", "torch.distributed.run", *agent)


by_each_launcher = pytest.mark.parametrize(
    "by", [by_mpiexec, pytest.param(by_torchrun, marks=pytest.mark.long)]
)
