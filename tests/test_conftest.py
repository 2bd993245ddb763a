"""The fixture `run` gives the same results whether ranks are threads or processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import programs
import ranks
from hpcsgd.comm import PeerLost

TESTS = Path(__file__).parent


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_results_come_in_rank_order(run, n):
    assert run(n, lambda world, x: (world.rank * x, world.size), 10) == [(10 * r, n) for r in range(n)]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_rank_takes_part(run, n):
    def total(world):
        x = torch.ones(3)
        world.allreduce(x).wait()
        return x.tolist()

    assert run(n, total) == [[n, n, n]] * n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_what_one_rank_raises_is_raised(run, n):
    def fail(world):
        if world.rank == n - 1:
            raise KeyError("only here")

    with pytest.raises(KeyError, match="only here"):
        run(n, fail)
    assert run(n, lambda world: world.size) == [n] * n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_are_counted_from_zero_in_every_run(run, n):
    def count(world):
        world.allreduce(torch.ones(n)).wait()
        return sum(total.calls for total in world.stats.totals().values())

    assert run(n, count) == run(n, count) == [1] * n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ranks_share_tmp_path(run, n, tmp_path):
    def write(world):
        (tmp_path / str(world.rank)).touch()
        world.barrier()
        return len(list(tmp_path.iterdir()))

    assert run(n, write) == [n] * n


def test_the_cause_goes_before_the_loss_of_a_peer():
    lost, cause = PeerLost("rank 1 is gone"), ValueError("why")
    assert ranks.cause([lost, cause]) is cause
    assert ranks.cause([lost]) is lost


def test_an_error_that_cannot_be_pickled_still_tells_what_it_said():
    class Local(Exception): ...

    error = Local("what happened")
    error.add_note("where")
    told = ranks.portable(error)
    assert "Local: what happened" in str(told)
    assert told.__notes__ == ["where"]
    plain = ValueError("x")
    assert ranks.portable(plain) is plain


ONE_THREAD = """
import subprocess, sys
from threadpoolctl import threadpool_info

SHOW = "import torch, threadpoolctl as t; print({pool['num_threads'] for pool in t.threadpool_info()})"

def test_it():
    assert {pool["num_threads"] for pool in threadpool_info()} == {1}
    assert subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True).stdout == "{1}\\n"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() == 1, reason="one core has one thread anyway")
def test_a_rank_has_one_thread_whoever_starts_pytest(tmp_path):
    """This includes the libraries of torch and numpy, and programs that a test starts."""
    pytest.importorskip("threadpoolctl")
    (tmp_path / "test_it.py").write_text(ONE_THREAD)
    pytest_ = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(TESTS)
    programs.run([*pytest_, "--rootdir", tmp_path, tmp_path], env=environment, timeout=90)


def pytest_on(n, *options, folder):
    """Run pytest in `n` processes on the tests in `folder`, with our fixtures, until it has ended."""
    launcher = [programs.mpiexec(), "-n", str(n)] if n > 1 else []
    pytest_ = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    return programs.run(
        [*launcher, *pytest_, *options, "--rootdir", folder, folder],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        check=False,
    )


CHOSEN = """
import pytest

@pytest.mark.parametrize("n", [1, 2, 4])
def test_n(run, n):
    assert run(n, lambda world: world.size) == [n] * n

@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2), (2, 1)])
@pytest.mark.threads(unless={"P": 2, "K": 1})
def test_shape(run, P, K):
    run(P * K, lambda world: None)

@pytest.mark.parametrize("now", [(1, 2), (2, 2)])
def test_now(run, now):
    run(now[0] * now[1], lambda world: None)

@pytest.mark.ranks(4)
def test_marked(run):
    run(4, lambda world: None)

@pytest.mark.processes
@pytest.mark.ranks(2)
def test_processes(run):
    run(2, lambda world: None)

def test_alone():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "options", "passed", "deselected"), [(1, [], 10, 1), (2, ["--with-mpi"], 4, 7)]
)
def test_what_is_for_another_number_of_ranks_is_deselected(tmp_path, n, options, passed, deselected):
    (tmp_path / "test_it.py").write_text(CHOSEN)
    done = pytest_on(n, *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed, {deselected} deselected" in done.stdout


@pytest.mark.ranks(1)
def test_who_runs_on_another_number_of_ranks_than_declared_fails(run):
    with pytest.raises(AssertionError, match="on 2 ranks, but collected for 1"):
        run(2, lambda world: None)


ENDINGS = {
    "one rank fails while the other waits for it": (
        "run(2, lambda world: 1 / 0 if world.rank == 1 else world.barrier())",
        "ZeroDivisionError",
    ),
    "one rank never comes back": (
        "run(2, lambda world: world.rank == 1 and time.sleep(600))",
        "Timeout",
    ),
    "one rank leaves": ("run(2, lambda world: world.rank == 1 and os._exit(3))", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_no_launch_hangs(ending, tmp_path):
    body, message = ENDINGS[ending]
    (tmp_path / "test_it.py").write_text(
        f"import os, time, pytest, ranks\n\nranks.GRACE = 3.0\n\n"
        f"@pytest.mark.ranks(2)\ndef test_it(run):\n    {body}\n"
    )
    patience = 5 if message == "Timeout" else 50  # a rank that waits for another one keeps a core busy
    done = pytest_on(2, "--with-mpi", f"--timeout={patience}", folder=tmp_path)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@pytest.mark.slow
def test_no_test_starts_mpi_in_the_process_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    import mpi4py.MPI\n")
    done = pytest_on(1, folder=tmp_path)
    assert "AssertionError: a test starts MPI in the process of pytest" in done.stdout


HANG = """
import threading
import conftest

conftest.END = 1.0

def waits_for_ever():
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()

def test_it():
    waits_for_ever()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--numprocesses=1"]])
def test_a_test_that_ignores_its_time_limit_ends_with_its_calls(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(HANG)
    done = pytest_on(1, "--timeout=1", *options, folder=tmp_path)
    assert done.returncode != 0
    assert "in waits_for_ever" in done.stderr
    assert not options or "crashed while running 'test_it.py::test_it'" in done.stdout
