"""The load of other processes, computed from the kernel's data about all processes and about ours."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from threading import Event

import programs
from harness.load import Load, descendants, of_job, others_runnable, runnable

SPIN = "print(flush=True)\nwhile True: pass"


def plant(proc: Path, pid: int, states: str, children: str = "", name: str = "python") -> None:
    """Write a process with one thread for each state into `proc`. Its first thread started the children."""
    for number, state in enumerate(states):
        thread = proc / str(pid) / "task" / str(pid + number)
        thread.mkdir(parents=True)
        (thread / "stat").write_text(f"{pid + number} ({name}) {state} 1 1 1\n")
        (thread / "children").write_text(children if number == 0 else "")


def test_all_that_we_started_is_ours(tmp_path):
    (tmp_path / "loadavg").write_text("9.00 9.00 9.00 7/99 12345\n")
    me = os.getpid()
    plant(tmp_path, me, "SR", f"{me + 10} {me + 20} ")
    plant(tmp_path, me + 10, "S", f"{me + 30} ")
    plant(tmp_path, me + 20, "D")
    plant(tmp_path, me + 30, "RRS", name="a) R (b")
    plant(tmp_path, me + 40, "RRR")  # a process of somebody else
    assert runnable(me, tmp_path) == 3
    assert others_runnable(tmp_path) == 7 - 3


def test_what_slurm_started_for_our_job_is_ours(tmp_path, monkeypatch):
    (tmp_path / "loadavg").write_text("9.00 9.00 9.00 9/99 12345\n")
    me = os.getpid()
    jobs = {me: "12", me + 10: "12", me + 20: "12", me + 30: "123", me + 40: None}
    for pid, states in zip(jobs, ["R", "RS", "RR", "R", "R"], strict=True):
        plant(tmp_path, pid, states, children=f"{me + 10} " if pid == me else "")
    for pid, job in jobs.items():
        if job:  # the last process belongs to another user: its environment cannot be read
            (tmp_path / str(pid) / "environ").write_text(f"HOME=/\0SLURM_JOB_ID={job}\0")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert sorted(of_job("12", tmp_path)) == [me, me + 10, me + 20]
    assert others_runnable(tmp_path) == 9 - (1 + 1 + 2)  # a child of ours counts once
    monkeypatch.delenv("SLURM_JOB_ID")
    assert others_runnable(tmp_path) == 9 - (1 + 1)


def test_a_kernel_that_names_no_children_still_names_parents(tmp_path):
    """Such a kernel was built without CONFIG_PROC_CHILDREN."""
    for pid, parent, states in [(1, 0, "S"), (10, 1, "RS"), (11, 10, "R"), (12, 11, "RR"), (20, 1, "R")]:
        plant(tmp_path, pid, states)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {states[0]} {parent} 1 1\n")
    for file in tmp_path.rglob("children"):
        file.unlink()
    assert sorted(descendants(10, tmp_path)) == [11, 12]
    assert runnable(10, tmp_path) == 4


def test_who_has_just_ended_is_not_runnable(tmp_path):
    plant(tmp_path, 1, "R", "2 ")
    assert runnable(1, tmp_path) == 1


def test_a_child_that_computes_is_ours_and_one_that_waits_is_not():
    spinning = programs.start([sys.executable, "-c", SPIN])
    waiting = programs.start([sys.executable, "-c", "input()"], stdin=programs.PIPE)
    with spinning, waiting:
        try:
            assert spinning.stdout is not None
            spinning.stdout.read(1)
            assert runnable(spinning.pid) == 1
            assert runnable(os.getpid()) >= 2  # the process that asks runs, too
            waiting.communicate("\n")
        finally:
            spinning.kill()
    assert runnable(spinning.pid) == runnable(waiting.pid) == 0


def test_it_is_the_mean_over_looks():
    seen, enough = iter([3, 0, 0]), Event()

    def look() -> int:
        value = next(seen, None)
        if value is None:
            enough.set()
            enough.wait()
            return 1
        return value

    load = Load(look, every=0.001)
    assert enough.wait(10)
    load.end()
    assert load.without_us() == 1.0


def test_looks_end():
    looks = []
    load = Load(lambda: looks.append(0) or 0, every=0.001)
    load.end()
    count = len(looks)
    time.sleep(0.05)
    assert len(looks) == count >= 1


def test_more_of_us_than_of_everybody_is_no_load():
    load = Load(lambda: -1)
    load.end()
    assert load.without_us() == 0.0
