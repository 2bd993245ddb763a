"""What the launcher started becomes a job, and what has to be loaded for that."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcsgd.errors import UserError
from hpcsgd.start import form_as_launched
from hpcsgd.transport import threads


def test_without_a_launcher_it_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    (job,) = threads.run(1, lambda world: form_as_launched(world, 4, None))
    assert (job.P, job.K) == (1, 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    with pytest.raises(UserError, match="groups = 4 is more than the 1 ranks"):
        threads.run(1, lambda world: form_as_launched(world, 4, None))


def test_a_method_loads_no_islands() -> None:
    """Nor what only they need: torch itself may have loaded some of that."""
    code = (
        "import sys, torch; before = set(sys.modules); import hpcsgd; hpcsgd.hierarchical, hpcsgd.ensemble; "
        "print(*(name for name in set(sys.modules) - before "
        "if name.split('.')[0] in ('asyncio', 'socket', 'socketserver') "
        "or name.startswith('hpcsgd.islands')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
