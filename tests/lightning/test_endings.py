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
    "rank 0 saves alone": Case("rank 0 saves", by_mpiexec, "rank 1 has left"),
}  # fmt: skip


def ended(command: list[str], folder: Path, **more: str) -> programs.Done:
    """Run a training that fails, and check that it ends soon."""
    done = programs.run(command, cwd=folder, env=unlaunched(**more), check=False, timeout=LIMIT * 2)
    began = min(float(at) for at in re.findall(r"begins at (\d+\.\d+)", done.stdout))
    assert time.monotonic() - began < LIMIT
    assert done.returncode != 0
    return done


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_training_that_fails_ends_with_one_line(case: Case, tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port())} if case.more else {}
    done = ended(case.by([PROGRAM, case.how], n=2), tmp_path, **case.more, **port)
    ours = [line for line in done.stderr.splitlines() if line.startswith("hpcsgd: ")]
    assert len(ours) == 1, done
    assert re.search(case.line, ours[0]), done


OF_TERM = {15, 143}
"""The exit codes of MPICH's and of Open MPI's mpiexec if SIGTERM has ended a rank."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("TERM on all", OF_TERM),
        ("TERM on all, in other steps", OF_TERM),
        ("TERM on 1", OF_TERM),
        ("INT on all", {1}),
        ("INT on 1", {1}),
    ],
)
def test_a_signal_ends_all_ranks(how: str, codes: set[int], tmp_path: Path) -> None:
    """The launcher's exit code is the only result: no rank prints a traceback or an error line."""
    done = ended(by_mpiexec([PROGRAM, how], n=2), tmp_path)
    assert done.returncode in codes, done
    assert "trained" not in done.stdout
    assert not re.search("Traceback|hpcsgd: ", done.stderr), done


@pytest.mark.slow
def test_without_lightning_a_line_says_what_to_install(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.modules['lightning'] = None\nimport hpcsgd.lightning")
    done = programs.run(python(str(script)), env=unlaunched(), check=False)
    assert done.returncode == 1
    assert done.stderr == 'hpcsgd: hpcsgd.lightning needs Lightning: pip install "hpcsgd[lightning]"\n'
