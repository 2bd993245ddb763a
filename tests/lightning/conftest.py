"""A fixture that runs trainings with Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_runs import Found, by_mpiexec, run_once


@pytest.fixture(scope="session")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """Return a function that runs cases in one program; tests that name the same cases share the run."""
    made: dict[Any, Found] = {}

    def run(*cases: str, by: Any = by_mpiexec) -> Found:
        if (by, cases) not in made:
            made[by, cases] = run_once(tmp_path_factory.mktemp("lightning"), *cases, by=by)
        return made[by, cases]

    return run
