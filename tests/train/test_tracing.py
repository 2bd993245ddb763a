"""Tests of a trace of a run: it is complete, has the requested steps, and its summary matches it."""

from __future__ import annotations

import re
import threading
import time as real_time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcsgd.comm import Communicator, phase, threads
from hpcsgd.core.topology import form
from hpcsgd.report.overlap import per_step
from hpcsgd.report.trace import NAME
from hpcsgd.train import tracing
from hpcsgd.train.tracing import Trace
from traces import Viewed, seconds_by_phase, view
from train.launches import JOB, launch, make_store
from train.test_loop import TEST, TRAIN, M, kind, train

WORDS = "--parallel.groups 2 --data.group_batch_size 4 --training.epochs 1"
"""The run has 6 steps; every second one synchronizes."""
K = 2


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", TRAIN, TEST)
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


def named(seen: Viewed, pattern: str, rank: int, tid: int | None = None) -> list[Any]:
    return [
        each
        for (pid, thread), slices in seen.slices.items()
        for each in slices
        if pid == rank and tid in (None, thread) and re.fullmatch(pattern, each.name)
    ]


def test_what_each_rank_did_in_some_steps(job_file: Path, tmp_path: Path) -> None:
    records = train(job_file, tmp_path, f"{WORDS} --run.trace_steps 2-4,6", n=4)
    seen = view(tmp_path / NAME)
    assert seen.processes == {rank: f"rank {rank}" for rank in range(4)}
    steps = ["step 2", "step 3", "step 4", "step 6"]
    padded = -(-M // K) * K
    for rank in range(4):
        assert [each.name for each in named(seen, "step .*", rank, 0)] == steps
        for what in ("forward", "backward", "update", "data"):
            assert len(named(seen, what, rank, 0)) >= len(steps), what
        sent = named(seen, "grad_reduce alltoall", rank)
        assert [each.arguments["bytes"] for each in sent] == [padded * 4 // K] * 4
        assert {each.arguments["ranks"] for each in sent} == {K}
        syncs = named(seen, "sync", rank, 999)
        assert [each.arguments["step"] for each in syncs] == [2, 4, 6]
        distances = {record["step"]: record["distance"] for record in kind(records, "sync")}
        assert [each.arguments["distance"] for each in syncs] == [distances[t] for t in (2, 4, 6)]
        averaged = named(seen, "model_average allreduce", rank)
        assert [(each.start, each.end) for each in syncs] == [(each.start, each.end) for each in averaged]
        assert named(seen, "eval", rank, 0)
        assert named(seen, "checkpoint", rank, 0)
        assert seen.threads[rank, 0] == "training"
        comm_threads = {name for (pid, _), name in seen.threads.items() if pid == rank}
        assert f"own communication thread of rank {rank}" in comm_threads


def test_the_summary_is_what_is_in_the_trace(job_file: Path, tmp_path: Path) -> None:
    train(job_file, tmp_path, f"{WORDS} --run.trace_steps 2-6", n=4)
    numbers = per_step(tmp_path / NAME)
    seen = seconds_by_phase(view(tmp_path / NAME))
    assert numbers["steps"] == 5
    for quantity in ("exposed", "hidden"):
        told = numbers[f"{quantity}_seconds"]
        expected = {phase: seconds / 5 for phase, seconds in seen[quantity].items() if seconds}
        assert {name: value for name, value in told.items() if value > 1e-9} == pytest.approx(
            {name: value for name, value in expected.items() if value > 1e-9}, abs=1e-7
        )
    told = [numbers[f"{quantity}_seconds"].get("grad_reduce", 0.0) for quantity in ("exposed", "hidden")]
    assert sum(told) > 0  # on busy cores all of it may be one or the other
    assert numbers["exposed_seconds"]["model_average"] > 0


def test_a_message_behind_computing_is_hidden_and_the_rest_of_it_is_not(tmp_path: Path) -> None:
    """Two messages take 0.2 s, while the training computes for 0.1 s and then waits for both."""
    computing, sending = 0.1, 0.2

    def one(world: Communicator) -> float:
        tracer = Trace(form(world), world.dup_with_thread(), tmp_path / NAME, "1", 0)
        other = world.dup_with_thread()
        start = real_time.perf_counter()
        with phase("grad_reduce"):
            slow = [on._start("slow", 1, lambda: real_time.sleep(sending)) for on in (world, other)]
        with tracer.span("forward"):
            real_time.sleep(computing)
        computed = real_time.perf_counter() - start
        with phase("grad_reduce"):
            for work in slow:
                work.wait()
        tracer.stepped(1, {})
        tracer.finish()
        return computed

    computed = fmean(threads.run(2, one))
    numbers = per_step(tmp_path / NAME)
    exposed, hidden = (numbers[f"{name}_seconds"]["grad_reduce"] for name in ("exposed", "hidden"))
    assert exposed + hidden > 0.95 * sending
    assert 0 < hidden <= computed + 1e-3, "both at once, and so once"


def test_windows_are_there_before_the_run_has_ended_and_a_new_start_adds_to_them(tmp_path: Path) -> None:
    file = tmp_path / NAME
    counts: list[int] = []

    def one(world: Communicator) -> None:
        for done in (0, 4):
            real_time.sleep(0.02 * (1 - world.rank))  # the one that comes first sees nothing before it
            tracer = Trace(form(world), world.dup_with_thread(), file, "1-2, 4, 5-6", done)
            for t in range(done + 1, done + 5):
                world.allreduce(torch.ones(3)).wait()
                tracer.stepped(t, {})
                if tracer._under_way:
                    tracer._under_way[-1].wait()
                    if world.rank == 0:
                        counts.append(sum(name == "step" for name in _steps(file)))
                world.barrier()
            tracer.finish()

    threads.run(2, one)
    assert counts == [2, 2, 3, 5, 5, 5][: len(counts)]
    assert _steps(file, full=True) == ["step 1", "step 2", "step 4", "step 5", "step 6"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_group_that_jumps_over_a_window_traces_the_next_one(tmp_path: Path) -> None:
    """An elastic group jumps to the step of the others when it returns."""

    def one(world: Communicator) -> None:
        tracer = Trace(form(world), world.dup_with_thread(), tmp_path / NAME, "3-4, 6", 0)
        for t in (1, 4, 5, 6):
            tracer.stepped(t, {})
        tracer.finish()

    threads.run(1, one)
    assert _steps(tmp_path / NAME, full=True) == ["step 6"]


def _steps(file: Path, full: bool = False) -> list[str]:
    names = [each.name for each in view(file).slices[0, 0] if each.name.startswith("step ")]
    return names if full else [name.split()[0] for name in names]


def test_clocks_are_brought_to_rank_0s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's clock is 100 s ahead of the previous rank's."""

    def perf_counter() -> float:
        rank = int(threading.current_thread().name.split()[-1])
        return real_time.perf_counter() + 100 * rank

    clock = SimpleNamespace(time=real_time.time, perf_counter=perf_counter)
    monkeypatch.setattr(tracing, "time", clock)

    def one(world: Communicator) -> tuple[float, float]:
        tracer = Trace(form(world), control := world.dup_with_thread(), tmp_path / NAME, "1", 0)
        tracer._began = clock.time()
        found = control.run(tracer._compared, "clocks").wait()
        return found.ahead, found.error

    told = threads.run(3, one)
    for rank, (ahead, error) in enumerate(told):
        assert ahead - told[0][0] == pytest.approx(-100 * rank, abs=max(error, 1e-9))
        assert error < 1


def test_where_it_cannot_be_written_the_training_goes_on(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracing, "append", full)
    train(job_file, tmp_path, f"{WORDS} --run.trace_steps 3-4", n=2)
    assert not (tmp_path / NAME).exists()
    assert (tmp_path / "model.pt").exists()
    assert f"{tmp_path / NAME}: cannot be written: No space left on device" in caplog.text


def test_without_it_there_is_none(job_file: Path, tmp_path: Path) -> None:
    train(job_file, tmp_path, WORDS, n=2)
    assert not (tmp_path / NAME).exists()


@pytest.mark.slow
def test_as_users_start_it(job_file: Path, tmp_path: Path) -> None:
    words = ["train", str(job_file), "--trace", *WORDS.split(), "--run.output_dir", "run"]
    ended = launch(tmp_path, *words, n=4)
    assert ended.code == 0, ended.err
    assert re.search(r"traced    4 steps; per step .*grad_reduce \S+ s exposed, \S+ s hidden", ended.out)
    assert (tmp_path / "run" / "timeline.png").exists()
    assert _steps(tmp_path / "run" / NAME, full=True) == [f"step {t}" for t in range(3, 7)]
