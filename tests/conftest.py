"""Fixtures and hooks that run tests on several ranks.

The ranks are threads of one pytest, or processes of `mpiexec … --with-mpi` or torchrun.

`run(n, function, *args)` calls `function(world, *args)` on n ranks and returns the n results. Under a
launcher, every rank is a separate pytest process. All of them run the same tests in the same order, see the
same results and raise the same exception; only rank 0 prints. Tests for another n are not collected.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # for each rank, in this process and in programs that tests start
# torch's stores look up the host names of their clients; without a name server each look-up takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import faulthandler
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import far
from brief import brief, may_be_for_ranks
from covering import parameters, repeated
from hpcsgd.comm import streams, threads
from ranks import BY_TORCHRUN, LAUNCHED, RANK, RANKS, complain, end_late, processes

torch.set_num_threads(1)

# All ranks have to see the same examples and reach the same verdict, so nothing may depend on chance or time.
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


STDERR = pytest.StashKey[int]()
END = 60.0  # seconds after its time limit in which a test has to end
TAKES_RUN = re.compile(r"def test\w+\([^)]*\brun\b")
on_threads = partial(threads.run, timeout=100.0)  # seconds; the machine may be busy


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return `run(n, function, *args)`, which returns `function(world, *args)` of n ranks, in rank order."""
    on_ranks, declared = processes().run if LAUNCHED else on_threads, size(request.node)

    def run_as_declared(n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        assert n == declared, f"on {n} ranks, but collected for {declared}"
        return on_ranks(n, function, *args)

    return run_as_declared


@pytest.fixture
def far_device() -> Iterator[None]:
    """Make the test device this machine's accelerator; see tests/far."""
    if (reason := far.missing()) is not None:
        pytest.skip(reason)
    with far.switched_on():
        yield


@pytest.fixture
def any_device(request: pytest.FixtureRequest) -> None:
    """Use the test device, or with `--on-devices` this machine's accelerators of that kind."""
    kind = request.config.getoption("--on-devices") or "far"
    if kind == "far":
        request.getfixturevalue("far_device")
    elif (there := streams.accelerator()) is None or there.type != kind:
        pytest.fail(f"--on-devices {kind}: torch sees {'none' if there is None else there.type} here")


if LAUNCHED:

    @pytest.fixture
    def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return one folder for all ranks of a test, made by rank 0: folders made by each rank clash."""
        return processes().same(tmp_path_factory.mktemp("ranks") if RANK == 0 else None)

    def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
        """Ignore test files without tests for ranks, because otherwise every rank would import them."""
        if not collection_path.match("test_*.py"):
            return None
        text, is_brief = collection_path.read_text(), config.getoption("--brief")
        wanted = TAKES_RUN.search(text) and (not is_brief or may_be_for_ranks(collection_path, text))
        return None if wanted else True


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "skip slow tests, and try each value of a parameter once (tests/brief.py)"
    parser.addoption("--brief", action="store_true", help=told)
    told = "run only the tests for any device (fixture any_device), on devices of that kind"
    parser.addoption("--on-devices", choices=("far", "cuda", "xpu"), help=told)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that do not run in this session, and move tests of Slurm to the front.

    Batch jobs wait for minutes, while other tests use the cores.
    """
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)
    here = {item for item in items if belongs_here(item)}
    if config.getoption("--brief"):
        here = brief((item for item in items if item in here), on_ranks=LAUNCHED)
    else:
        for item in repeated((item for item in items if item in here), on_ranks=LAUNCHED):
            item.add_marker(pytest.mark.long)
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = [item for item in items if item in here]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare the test device before the first test, because compiling it takes longer than a test may take.

    After that, the garbage collector ignores the million objects that exist already.
    """
    kinds = {"far_device"} | ({"any_device"} if on_devices(session.config) in (None, "far") else set())
    wanted = any(kinds.intersection(getattr(item, "fixturenames", ())) for item in session.items)
    if wanted and not session.config.option.collectonly:
        far.prepare()
    if not LAUNCHED:
        gc.freeze()


def on_devices(config: pytest.Config) -> str | None:
    """Return the kind of device to which `--on-devices` restricts the tests, or None."""
    return config.getoption("--on-devices")


def belongs_here(item: pytest.Item) -> bool:
    """Return True if a test runs in this session.

    Under a launcher, a test has to be for this number of ranks and not only for threads. With `--on-devices`,
    tests for threads run on processes, too.
    """
    one_kind = on_devices(item.config)
    if one_kind and "any_device" not in getattr(item, "fixturenames", ()):
        return False
    if not LAUNCHED:
        return item.get_closest_marker("processes") is None
    if "run" not in getattr(item, "fixturenames", ()) or size(item) != RANKS:
        return False
    if BY_TORCHRUN and item.get_closest_marker("of_mpi") is not None:
        return False
    if not BY_TORCHRUN:
        item.add_marker(pytest.mark.mpi(min_size=size(item)))
    if (alone := item.get_closest_marker("threads")) is None or one_kind:
        return True
    given, unless = parameters(item), alone.kwargs.get("unless")
    return unless is not None and all(
        given[name] in (value if isinstance(value, set) else {value}) for name, value in unless.items()
    )


def size(item: pytest.Item) -> int:
    """Return the number of ranks of a test, from its marker `ranks` or its parameters n, P, K or `now`."""
    if (marker := item.get_closest_marker("ranks")) is not None:
        return marker.args[0]
    match parameters(item):
        case {"n": n}:
            return n
        case {"now": (P, K)} | {"P": P, "K": K}:
            return P * K
        case {"P": one} | {"K": one}:
            return one
    raise pytest.UsageError(f"{item.nodeid}: on how many ranks? Mark it `ranks(n)`")


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Start the timers of a test.

    Under a launcher, exceeding the limit ends the whole job: if the rank only failed, the other ranks would
    wait for it. Otherwise pytest-timeout raises an exception in the test. A test that does not end then
    either, because it waits for its threads or for a program, ends the process; so does one that blocks the
    interpreter. All threads' calls are printed before.
    """
    limit = settings.timeout + END
    faulthandler.dump_traceback_later(limit, file=item.config.stash[STDERR], exit=True)
    if not LAUNCHED:
        return None  # pytest-timeout sets its own timer
    timer = threading.Timer(settings.timeout, end_late, [item.nodeid, settings.timeout])
    timer.daemon = True
    timer.start()
    item.cancel_timeout = timer.cancel  # pyright: ignore[reportAttributeAccessIssue]
    return True


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def refuse_mpi(event: str, given: tuple[Any, ...]) -> None:
    """Refuse to start MPI in the process of pytest itself.

    A pytest worker that takes long to end is killed. It would leave a file of MPI in shared memory.
    """
    if event == "import" and given[0] == "mpi4py.MPI":
        raise AssertionError("a test starts MPI in the process of pytest: let a program or `run` do it")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--with-mpi") != (LAUNCHED and not BY_TORCHRUN):
        raise pytest.UsageError(f"{RANKS} processes: --with-mpi goes with mpiexec -n 2 and more")
    config.stash[STDERR] = os.dup(2)  # pytest does not capture it now
    if not LAUNCHED:
        sys.addaudithook(refuse_mpi)
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
    """Return one more than the number of cores, because some tests only wait."""
    return len(os.sched_getaffinity(0)) + 1
