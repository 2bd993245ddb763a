"""How benchmarks start programs: their standard input, their time limit, and the message of an error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import programs


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


READS = python("import sys; print(repr(sys.stdin.read()))")


@pytest.fixture
def open_stdin() -> Iterator[None]:
    """Replace this process's standard input by a pipe that is empty and stays open."""
    reading, writing = os.pipe()
    own = os.dup(0)
    os.dup2(reading, 0)
    try:
        yield
    finally:
        os.dup2(own, 0)
        for each in (own, reading, writing):
            os.close(each)


@pytest.mark.usefixtures("open_stdin")
def test_a_program_that_reads_sees_the_end_at_once() -> None:
    assert programs.run(READS, timeout=60).stdout == "''\n"


@pytest.mark.usefixtures("open_stdin")
def test_so_does_one_that_goes_on() -> None:
    with programs.start(READS, stdout=programs.PIPE) as program:
        try:
            assert program.communicate(timeout=60) == ("''\n", None)
        finally:
            program.kill()


def test_a_launcher_survives_ranks_that_have_left() -> None:
    """Hydra tells rank 0 that stdin has ended. On busy cores this can be too late, and Hydra gets SIGPIPE."""
    assert programs.run(["sh", "-c", "kill -PIPE $$; echo lives"], timeout=60).stdout == "lives\n"


def test_a_pipe_is_given_to_who_asks() -> None:
    with programs.start(READS, stdin=programs.PIPE, stdout=programs.PIPE) as program:
        assert program.communicate("said", timeout=60) == ("'said'\n", None)


def test_an_error_tells_the_command_the_code_and_what_was_printed() -> None:
    command = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    with pytest.raises(programs.Failed) as failed:
        programs.run(command, timeout=60)
    first, *printed = str(failed.value).splitlines()
    assert first.startswith(f"{sys.executable} -I -S -c ")
    assert first.endswith(": code 3")
    assert printed == ["out", "err"]


def test_an_unchecked_code_is_returned() -> None:
    done = programs.run(python("raise SystemExit('no')"), timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no\n")


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_killed() -> None:
    """The error contains what the program printed before."""
    began = time.monotonic()
    with pytest.raises(programs.Failed, match="not over after 5 s") as failed:
        programs.run(["sh", "-c", "echo $$; echo …; exec sleep 600"], timeout=5)
    assert time.monotonic() - began < 60
    pid, dots = str(failed.value).splitlines()[1:]
    assert dots == "…"
    assert not Path("/proc", pid).exists()


def test_without_capture_it_prints_where_we_do(capfd: pytest.CaptureFixture[str]) -> None:
    programs.run(python("print('progress')"), timeout=60, capture=False)
    assert capfd.readouterr().out == "progress\n"
    with pytest.raises(programs.Failed, match=r": code 4$"):
        programs.run(python("raise SystemExit(4)"), timeout=60, capture=False)


def test_it_runs_where_and_with_what_it_is_given(tmp_path: Path) -> None:
    command = python("import os; print(os.getcwd(), os.environ['SAID'])")
    printed = programs.run(command, cwd=tmp_path, env={**os.environ, "SAID": "so"}, timeout=60).stdout
    assert printed == f"{tmp_path.resolve()} so\n"


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        programs.run(["no-such-program"], timeout=60)
