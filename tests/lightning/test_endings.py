"""Tests that a training with Lightning ends soon, with one line, if it cannot begin or if a rank fails."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

import programs
from comm.jobs import free_port
from lightning_runs import by_mpiexec, by_torchrun
from pythons import python
from train.launches import unlaunched

PROGRAM = str(Path(__file__).with_name("endings.py"))
LIMIT = 45.0
"""Seconds; the job itself takes a few, and its timeout for ranks that do not answer is 600."""


class Case(NamedTuple):
    how: str
    by: Callable[..., list[str]]
    line: str
    """A regex for the line that is printed once."""
    more: Mapping[str, str] = {}
    """Environment variables."""


OTHERS = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
CASES = {
    "other devices": Case(
        "devices", by_mpiexec,
        r"Trainer\(devices=1, num_nodes=1\): 2 ranks were started on 1 node: give Trainer\(devices=2,",
    ),
    "other devices, torchrun": Case("devices", by_torchrun, r"Trainer\(devices=1, num_nodes=1\): 2 ranks"),
    "two launchers": Case("good", by_mpiexec, r"RANK = 3 and WORLD_SIZE = 4: two launchers", OTHERS),
    "MPI by torchrun": Case("mpi", by_torchrun, r"torchrun \(WORLD_SIZE\) started 2 ranks but MPI sees"),
    "an exception in a step": Case("raises", by_mpiexec, "rank 1: ValueError"),
    "an exception while another rank computes": Case("hangs", by_mpiexec, "rank 1: ValueError"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_training_that_fails_ends_with_one_line(case: Case) -> None:
    port = {"MASTER_PORT": str(free_port())} if case.more else {}
    done = programs.run(
        case.by([PROGRAM, case.how], n=2), env=unlaunched(**case.more, **port), check=False, timeout=LIMIT * 2
    )
    began = min(float(at) for at in re.findall(r"begins at (\d+\.\d+)", done.stdout))
    assert time.monotonic() - began < LIMIT
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("hpcsgd: ")]
    assert len(ours) == 1, done
    assert re.search(case.line, ours[0]), done


def test_without_lightning_a_line_says_what_to_install(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.modules['lightning'] = None\nimport hpcsgd.lightning")
    done = programs.run(python(str(script)), env=unlaunched(), check=False)
    assert done.returncode == 1
    assert done.stderr == 'hpcsgd: hpcsgd.lightning needs Lightning: pip install "hpcsgd[lightning]"\n'
