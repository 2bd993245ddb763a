"""Sections of `benchmarks/gpu.py`: one that fails or hangs affects no other and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import programs
from gpu import one_rank, overlap, overlap_rank, pytests, waits
from gpu.section import Found
from harness import Goal
from pythons import python
from selection import cuda

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHILDREN = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
{then}
"""
RUNNER = """
import sys
from pathlib import Path

script, log, timeout, benchmarks = sys.argv[1:]
sys.path.insert(0, benchmarks)
from harness.limited import run_limited

print(run_limited([sys.executable, script], Path(log), timeout=float(timeout))[0])
"""


@pytest.mark.slow  # ranks that are killed leave memory of MPICH behind
@pytest.mark.parametrize(
    ("then", "timeout", "told"),
    [
        ("time.sleep(600)", 3.0, "not over after 3 s"),
        ("sys.exit(3)", 60.0, "code 3"),
        ("os.kill(os.getpid(), 9)", 60.0, "code -9"),
        ("", 60.0, ""),
    ],
)
def test_nothing_is_left_of_a_section(then: str, timeout: float, told: str, tmp_path: Path) -> None:
    """A child in its own session, such as a rank of MPICH, is killed as well. Its output is kept."""
    (tmp_path / "section.py").write_text(CHILDREN.format(then=then))
    (tmp_path / "runner.py").write_text(RUNNER)
    log = tmp_path / "log.txt"
    words = [str(tmp_path / "section.py"), str(log), str(timeout), str(BENCHMARKS)]
    done = programs.run(python(str(tmp_path / "runner.py"), *words))
    assert done.stdout.strip() == told
    child = int(log.read_text().split()[0])
    assert not Path(f"/proc/{child}").exists()


def test_what_a_section_finds_is_written_at_once(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    found = Found(file)
    found.add("one", [{"n": 1}], [Goal("a ratio", 2.0, 1.0)])
    assert json.loads(file.read_text()) == {
        "rows": [{"part": "one", "n": 1}],
        "goals": [{"name": "a ratio", "value": 2.0, "goal": 1.0, "met": False}],
    }
    found.add("two", [{"n": 2}])
    assert [row["part"] for row in json.loads(file.read_text())["rows"]] == ["one", "two"]


def event(name: str, ts: float, dur: float, cat: str, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


def test_waits_of_the_host_are_named() -> None:
    events = [
        event(waits.STEP, 0, 100, "user_annotation"),
        event("aten::item", 10, 20, "cpu_op"),
        event("aten::_local_scalar_dense", 11, 18, "cpu_op"),
        event("cudaStreamSynchronize", 12, 10, "cuda_runtime"),
        event("cudaLaunchKernel", 40, 1, "cuda_runtime"),
        event("cudaMemcpy", 50, 1, "cuda_runtime"),
        event("aten::elsewhere", 49, 5, "cpu_op", tid=2),
        event("cudaDeviceSynchronize", 150, 5, "cuda_runtime"),
    ]
    assert waits.named(events) == {
        "cudaStreamSynchronize in aten::_local_scalar_dense": 1,
        "cudaMemcpy in no operation of torch": 1,
    }


def test_waits_that_plain_torch_has_too_count_for_nobody() -> None:
    spread = {"median": 1.0, "low": 1.0, "high": 1.0}
    common = {"model": "m", "ratio": spread, "peak_bytes": 110, "allowed_bytes": 100}
    rows = [
        {**common, "who": one_rank.PLAIN, "waits": {"a": 2}},
        {**common, "who": "bsp", "waits": {"a": 2, "b": 1}},
    ]
    goals = {goal.name: (goal.value, goal.met) for goal in one_rank.goals(rows)}
    assert goals == {
        "m: bsp over plain torch": (1.0, True),
        "m: bsp: waits of the host beyond those of plain torch": (1, False),
        "m: bsp: peak of memory over the formula": (1.1, False),
    }


def test_what_is_beside_kernels() -> None:
    row = overlap.row_of("copies", [(0, 2000), (1000, 3000), (9000, 10_000)], [(500, 2500)])
    assert row == {"what": "copies", "ms": 4.0, "beside_ms": 2.0}


def test_what_is_within_a_step() -> None:
    assert overlap.within([(0, 2), (3, 5), (6, 9), (9, 10)], 1, 7) == [(1, 2), (3, 5), (6, 7)]


def test_what_a_stream_does_has_its_own_name() -> None:
    event = {"ph": "X", "ts": 1.0, "dur": 2.0, "args": {"stream": 7}}
    seen = [
        {**event, "cat": "kernel", "name": "gemm"},
        {**event, "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)"},
        {**event, "cat": "gpu_memset", "name": "Memset (Device)"},
    ]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    names = ["kernels, stream 7", "Memcpy DtoH, stream 7", "Memset, stream 7"]
    assert list(overlap_rank.of_device(seen, kinds)) == names


def test_the_device_is_given_more_to_do_where_it_waited_for_the_host(monkeypatch) -> None:
    class Event:
        """An event that has always happened."""

        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Event) -> float:
            return 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(cuda, "N", 1)
    monkeypatch.setattr(cuda, "MOST_AHEAD", 3 * cuda.AHEAD)
    clock = cuda.DeviceClock(torch.device("cpu"))
    ahead = []
    for _ in range(3):
        clock.start()
        assert clock.stop() == 0.005
        ahead.append(clock._ahead / cuda.AHEAD)
    assert ahead == [2, 3, 3]


def test_tests_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "0.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure message="no"/></testcase>'
        '<testcase classname="a" name="d"><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    assert pytests._read(file) == (1, {"a.d": "no GPU"}, {"a.c": "no"})
    tested = pytests.Tested(("x",), 1, *pytests._read(file), "")
    assert [(goal.value, goal.met) for goal in tested.goals("x")] == [(2, False)]
    (none,) = pytests.Tested(("x",), 1, 0, {}, {}, "").goals("x")
    assert not none.met


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_section_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    """Rehearse the shortest section, on the test device if there is one."""
    words = ["--rehearse", "--only", "overlap", "--out", str(tmp_path)]
    done = programs.run(python(str(BENCHMARKS / "gpu.py"), *words), timeout=500)
    assert "overlap" in done.stdout
    found = json.loads((tmp_path / "results.json").read_text())
    assert {row["what"] for row in found["rows"]} >= {"messages", "hidden by the trace"}
    assert found["machine"]["rehearsed"] is True
    assert "not to their end" not in done.stderr


def test_a_picture_of_two_steps_is_drawn(tmp_path: Path) -> None:
    """The trace contains what only a GPU has: kernels and copies on separate streams."""
    seen = [
        {**event("gemm", 10, 20, "kernel"), "args": {"stream": 7}},
        {**event("Memcpy DtoH (Device -> Pinned)", 15, 10, "gpu_memcpy"), "args": {"stream": 13}},
        {**event("gemm", 120, 20, "kernel"), "args": {"stream": 7}},
        event("cudaLaunchKernel", 1, 1, "cuda_runtime"),
    ]
    kernels, copies = (overlap_rank.of_device(seen, kinds) for kinds in (("kernel",), ("gpu_memcpy",)))
    assert kernels == {"kernels, stream 7": [(10, 30), (120, 140)]}
    assert copies == {"Memcpy DtoH, stream 13": [(15, 25)]}
    steps = [[0, 100], [100, 200]]
    told = {"kernels": kernels, "copies": copies, "messages": [[20, 60]], "steps": steps}
    assert overlap.lines_of(told) == {
        "kernels of the default stream": [(10, 30), (120, 140)],
        "copies to the host": [(15, 25)],
        "messages": [[20, 60]],
    }
    overlap.draw(told, tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
