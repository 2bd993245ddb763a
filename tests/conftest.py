"""How tests run on several ranks: as threads of one pytest, or as the processes of a pytest under mpiexec.

`run(n, function, *args)` calls `function(world, *args)` on n ranks and returns the n results. Under a
launcher every rank is a pytest of its own; all of them go through the same tests in the same order, see the
same results and raise the same exception, and rank 0 alone prints.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of a rank: here, where it is read below, and in all that tests start

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from hpcsgd.transport import threads
from ranks import LAUNCHED, RANK, RANKS, complain, end_late, processes

torch.set_num_threads(1)

# Every rank has to see the same examples and judge them alike, so nothing may depend on chance or time.
hypothesis.settings.register_profile("one process", deadline=None)
hypothesis.settings.register_profile(
    "ranks",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ranks" if LAUNCHED else "one process")


@pytest.fixture(scope="session")
def run() -> Callable[..., list[Any]]:
    """`run(n, function, *args)`: the results of `function(world, *args)` on n ranks, in rank order."""
    return processes().run if LAUNCHED else threads.run


if LAUNCHED:

    @pytest.fixture
    def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """One folder for all ranks of a test, made by rank 0: pytests making one each clash."""
        return processes().same(tmp_path_factory.mktemp("ranks") if RANK == 0 else None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs on several ranks; under a launcher nothing else has a place.

    Batch jobs come first: they wait for minutes, while other tests use the cores.
    """
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)
    ranks = [item for item in items if "run" in getattr(item, "fixturenames", ())]
    for item in ranks:
        item.add_marker("ranks")
    if LAUNCHED:
        config.hook.pytest_deselected(items=[item for item in items if item not in ranks])
        items[:] = ranks


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A rank that is late ends the job: were it only to fail, the others would wait for it."""
    if not LAUNCHED:
        return None  # pytest-timeout's own way
    timer = threading.Timer(settings.timeout, end_late, [item.nodeid, settings.timeout])
    timer.daemon = True
    timer.start()
    item.cancel_timeout = timer.cancel  # pyright: ignore[reportAttributeAccessIssue]
    return True


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if RANK > 0:
        manager = config.pluginmanager
        manager.unregister(name="terminalreporter")
        nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as pytest runs
        manager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if RANK > 0 and report.failed:
        complain(f"failed here too: {report.nodeid} ({report.when})")


def pytest_report_header() -> str:
    return f"ranks: {RANKS} processes" if LAUNCHED else "ranks: threads"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, for tests that wait."""
    return len(os.sched_getaffinity(0)) + 1
