"""Programs that tests start do not read the tests' input, end in time, and errors contain their output."""

from __future__ import annotations

import os
import re
import select
import signal
from typing import Any

import pytest

import programs

WAITS = "echo printed; echo ready >&2; exec sleep 60"
"""A program that has printed a line before it reports that it is ready."""
LEAVES = "sleep 60 & echo $!; echo ready >&2; wait"
"""A program that starts another one, which survives if only the first is killed."""


def waiting(program: str = WAITS, **how: Any) -> programs.Running:
    process = programs.start(["sh", "-c", program], **how)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    return process


def test_there_is_nothing_to_read():
    assert programs.run(["cat"]).stdout == ""


def test_input_is_read():
    assert programs.run(["cat"], input="two\nlines\n").stdout == "two\nlines\n"


def test_a_failure_is_reported(tmp_path):
    command = ["sh", "-c", "pwd; echo $A; echo why >&2; exit 3"]
    with pytest.raises(AssertionError) as failed:
        programs.run(command, cwd=tmp_path, env={"A": "b"})
    assert str(failed.value) == (
        f"sh -c 'pwd; echo $A; echo why >&2; exit 3': exit code 3\nstdout:\n{tmp_path}\nb\n\nstderr:\nwhy\n"
    )


def test_a_failure_may_be_expected():
    done = programs.run(["sh", "-c", "echo why >&2; exit 3"], check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "why\n")


def test_time_is_limited():
    with pytest.raises(programs.TimedOut, match=r"^sleep 60: killed after 0\.05 s\n"):
        programs.run(["sleep", "60"], timeout=0.05)


def test_what_was_printed_before_the_time_was_up_is_reported():
    process = waiting()
    with pytest.raises(programs.TimedOut, match=r"stdout:\nprinted\n"):
        programs.finish(process, 0.05)
    assert process.returncode == -signal.SIGKILL


def test_what_a_program_has_started_is_not_waited_for(monkeypatch):
    """The other program keeps the output open and has not ended."""
    monkeypatch.setattr(programs, "GRACE", 0.05)
    process = waiting(LEAVES)
    with pytest.raises(programs.TimedOut) as failed:
        programs.finish(process, 0.05)
    found = re.search(r"stdout:\n(\d+)\n", str(failed.value))
    assert found, failed.value
    os.kill(int(found[1]), signal.SIGKILL)


def test_a_session_of_its_own_is_killed_with_a_program():
    reading, writing = os.pipe()
    process = waiting(LEAVES, stdout=writing, start_new_session=True)
    os.close(writing)
    with open(reading) as printed:
        assert printed.readline().strip().isdecimal()
        with pytest.raises(programs.TimedOut):
            programs.finish(process, 0.05)
        poll = select.poll()  # select() takes no file above 1023, and the process of the tests may have more
        poll.register(printed, select.POLLIN)
        assert poll.poll(10_000), "somebody may still print"
        assert printed.read() == ""


def test_an_interrupted_wait_tells_what_was_printed(monkeypatch):
    """The wait is interrupted, for example, when the time of the whole test is up."""
    process = waiting()

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyError("interrupted")

    monkeypatch.setattr(process, "communicate", interrupted)
    with pytest.raises(KeyError, match="interrupted") as failed:
        programs.finish(process)
    assert failed.value.__notes__ == [f"sh -c '{WAITS}': killed\nstdout:\nprinted\n\nstderr:\n"]
    assert process.returncode == -signal.SIGKILL


def test_what_was_started_is_finished():
    process = programs.start(["sh", "-c", "read word; echo $word; exit 3"], stdin=programs.PIPE)
    done = programs.finish(process, input="typed\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "typed\n", "")


def test_a_program_that_has_ended_can_be_killed():
    process = programs.start(["true"])
    assert process.wait(programs.TIMEOUT) == 0
    programs.kill(process)
    assert programs.finish(process).returncode == 0


def test_an_mpiexec_does_not_die_of_what_its_ranks_no_longer_read(tmp_path):
    """Hydra writes to rank 0 when stdin ends. This script writes to a pipe that nobody reads."""
    script = tmp_path / "mpiexec"
    script.write_text("#!/bin/sh\n(exec 3>&1; sleep 0.1; echo late >&3; echo $? >&2) | true\n")
    script.chmod(0o755)
    assert programs.run([script]).stderr.endswith("1\n")
    other = tmp_path / "other"
    script.rename(other)
    assert programs.run([other], check=False).stderr == ""
