"""Tests of one communication thread: order of calls, errors, phases, and an end in finite time."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import programs
from hpcsgd.comm import CommStats, CommThread, PeerLost, phase, threads
from hpcsgd.comm.comm_thread import close_comm_threads, know_processor

PATIENCE = 60.0  # seconds; the machine may be busy


def submit(comm_thread: CommThread, call, timeout: float = PATIENCE, stats: CommStats | None = None):
    return comm_thread.submit(call, "call", timeout, stats or CommStats())


def test_calls_run_one_by_one_in_order_on_one_other_thread() -> None:
    comm_thread, running, seen = CommThread("test"), threading.Lock(), []

    def call(i: int) -> int:
        with running:
            assert running.locked()
            time.sleep(0.001 * (5 - i))
            seen.append((i, threading.current_thread().name))
        return i

    works = [submit(comm_thread, lambda i=i: call(i)) for i in range(5)]
    assert [work.wait() for work in works] == list(range(5))
    assert seen == [(i, "test") for i in range(5)]
    assert comm_thread.close(PATIENCE)


def test_wait_gives_up_after_the_timeout_and_says_on_what() -> None:
    comm_thread, release, stats = CommThread("test"), threading.Event(), CommStats()
    work = comm_thread.submit(release.wait, "allreduce over 4 ranks", 0.05, stats)
    with pytest.raises(PeerLost, match=r"^allreduce over 4 ranks: no answer within 0\.05 s$") as raised:
        work.wait()
    assert raised.value.ranks == ()
    assert stats.totals()["other"].waited >= 0.05
    assert not comm_thread.close(0.01)
    release.set()
    assert work.wait() is True
    assert comm_thread.close(PATIENCE)


def test_what_a_comm_thread_waits_for_is_not_its_owners_waiting() -> None:
    here, there, stats = CommThread("here"), CommThread("there"), CommStats()
    release, ended = threading.Event(), threading.Event()
    inner = submit(there, release.wait, stats=stats)
    submit(here, lambda: (inner.wait(), ended.set()), stats=stats)
    time.sleep(0.1)
    release.set()
    assert ended.wait(PATIENCE)
    assert not any(total.waited for total in stats.totals().values())
    assert here.close(PATIENCE)
    assert there.close(PATIENCE)


def test_a_timeout_of_the_operation_itself_comes_through() -> None:
    comm_thread = CommThread("test")

    def fail() -> None:
        raise TimeoutError("a disk, say")

    with pytest.raises(TimeoutError, match="a disk, say"):
        submit(comm_thread, fail).wait()
    assert comm_thread.close(PATIENCE)


def test_the_phase_of_the_submitter_goes_along() -> None:
    comm_thread, stats, release = CommThread("test"), CommStats(), threading.Event()
    blocked = submit(comm_thread, release.wait)
    with phase("outer"):
        with phase("inner"):
            inner = submit(comm_thread, lambda: stats.add(calls=1, sent=1))
        outer = submit(comm_thread, lambda: stats.add(calls=1, sent=2))
    other = submit(comm_thread, lambda: stats.add(calls=1, sent=4))
    release.set()
    for work in (blocked, inner, outer, other):
        work.wait()
    assert {name: total.bytes for name, total in stats.totals().items()} == {
        "inner": 1,
        "outer": 2,
        "other": 4,
    }
    assert comm_thread.close(PATIENCE)


def test_submitting_from_the_comm_thread_runs_at_once() -> None:
    comm_thread = CommThread("test")

    def outer() -> list[str]:
        order = []
        work = submit(comm_thread, lambda: order.append("inside"))
        order.append("after")
        work.wait()
        return order

    assert submit(comm_thread, outer).wait() == ["inside", "after"]
    assert comm_thread.close(PATIENCE)


def test_work_given_to_another_comm_thread_is_done_when_that_is() -> None:
    here, there, release = CommThread("here"), CommThread("there"), threading.Event()
    work = submit(here, lambda: submit(there, release.wait))
    submit(here, lambda: None).wait()  # the thread itself has finished the call
    assert not work.done()
    release.set()
    assert work.wait() is True
    assert work.done()
    assert here.close(PATIENCE)
    assert there.close(PATIENCE)


def test_what_another_comm_thread_raises_comes_through() -> None:
    here, there = CommThread("here"), CommThread("there")

    def fail() -> None:
        raise PeerLost("rank 3")

    work = submit(here, lambda: submit(there, fail))
    with pytest.raises(PeerLost, match="rank 3"):
        work.wait()
    assert work.done()
    alone = submit(here, fail)
    with pytest.raises(PeerLost, match="rank 3"):
        alone.wait()
    assert alone.done()
    assert here.close(PATIENCE)
    assert there.close(PATIENCE)


def test_closing_waits_for_what_is_queued() -> None:
    comm_thread, done = CommThread("test"), []
    submit(comm_thread, lambda: time.sleep(0.05))
    submit(comm_thread, lambda: done.append(True))
    assert close_comm_threads(PATIENCE, [comm_thread])
    assert done == [True]
    assert CommThread("never started").close(0.0)


@pytest.mark.slow
def test_a_finished_operation_lets_go_of_its_tensors() -> None:
    comm_thread, x = CommThread("test"), torch.ones(3)
    there = weakref.ref(x)
    submit(comm_thread, x.sum).wait()
    del x
    gc.collect()
    until = time.monotonic() + PATIENCE
    while there() is not None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert comm_thread.close(PATIENCE)


def test_a_comm_thread_that_was_closed_begins_again() -> None:
    """A part of a program may close the thread while another part continues to use it."""
    comm_thread, stats = CommThread("closed for a while"), CommStats()
    first = comm_thread.submit(threading.get_ident, "first", 60, stats).wait()
    assert comm_thread.close(60)
    assert comm_thread.close(60)
    assert comm_thread.submit(threading.current_thread, "second", 60, stats).wait().is_alive()
    assert comm_thread.close(60)
    assert first != threading.get_ident()


def what_mkl_has_noted() -> ctypes.c_int | None:
    """Return where MKL stores the processor type by which it chooses kernels of vector functions.

    The value is −1 before the first of these functions runs. Its address is taken from the first instruction
    of the function that detects the processor. The result is None if that function begins differently.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists() or not hasattr(torch_cpu := ctypes.CDLL(str(library)), "mkl_vml_serv_cpu_detect"):
        return None
    start = ctypes.cast(torch_cpu.mkl_vml_serv_cpu_detect, ctypes.c_void_p).value or 0
    if ctypes.string_at(start, 2) != b"\x8b\x05":  # mov eax, [offset from the next instruction]
        return None
    return ctypes.c_int.from_address(start + 6 + ctypes.c_int.from_address(start + 2).value)


def test_mkl_knows_the_processor_before_there_are_other_threads() -> None:
    """If several threads detect it at once, one may use another kernel, which gives other bits."""
    if (noted := what_mkl_has_noted()) is None:
        pytest.skip("not the MKL that threads must not come upon together")
    know_processor()
    right, noted.value = noted.value, -1
    [found] = threads.run(1, lambda _: noted.value)
    noted.value = right
    assert found == right >= 0


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "module"), [("mpi", "mpi"), ("gloo", "gloo_world")])
def test_init_knows_the_processor_before_it_joins_the_other_ranks(backend: str, module: str) -> None:
    script = (
        f"import sys, hpcsgd; from hpcsgd.comm import {module} as module; "
        f"module.know_processor = lambda: sys.exit(7); hpcsgd.init(backend={backend!r})"
    )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    done = programs.run([sys.executable, "-c", script], env={**os.environ, **alone}, check=False)
    assert done.returncode == 7, done
