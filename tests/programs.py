"""Functions that start programs; tests start programs only by these.

A program does not inherit the standard input of the tests: its own is empty, or is what the test gives it. It
is killed at its time limit, and the exception then has all that it has printed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess, Popen, TimeoutExpired
from typing import IO, Any, cast

DEVNULL, PIPE, STDOUT = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
TIMEOUT = 100.0
"""The time limit of a program in seconds, unless the test gives another; the machine may be busy."""
GRACE = 1.0
"""Seconds for which `finish` reads the output of a killed program, whose children may keep it open."""

Running = Popen[str]
Done = CompletedProcess[str]
File = int | IO[Any]
"""Where output goes: a file or a descriptor. None stands for the output of the tests."""
BESIDE = str(Path(sys.executable).parent)
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([BESIDE, *os.get_exec_path()]))


class TimedOut(AssertionError):
    """The error that a program was killed because it had not ended at its time limit."""


def run(
    command: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,  # noqa: A002 - subprocess calls it so
    timeout: float = TIMEOUT,
    check: bool = True,
) -> Done:
    """Run a program to its end and return its output. With `check`, an exit code other than 0 is an error."""
    process = start(command, cwd=cwd, env=env, stdin=DEVNULL if input is None else PIPE)
    done = finish(process, timeout, input)
    if check and done.returncode != 0:
        raise AssertionError(_told(process, f"exit code {done.returncode}", done.stdout, done.stderr))
    return done


def start(
    command: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: File = DEVNULL,
    stdout: File | None = PIPE,
    stderr: File | None = PIPE,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> Running:
    """Start a program that the test watches, signals or kills before it calls `finish`.

    Hydra's mpiexec notifies rank 0 that stdin has ended, and dies of SIGPIPE if that rank has ended already.
    Therefore mpiexec ignores this signal, as Python does; other programs handle it as usual.

    The environment never has PYTHONUNBUFFERED: with it, `print` writes a line and its end separately, and
    mpiexec may put the output of another rank between them.
    """
    ignores_sigpipe = Path(command[0]).name == "mpiexec"
    environment = {
        name: value
        for name, value in (os.environ if env is None else env).items()
        if name != "PYTHONUNBUFFERED"
    }
    return Popen(
        [str(word) for word in command], cwd=cwd, env=environment, stdin=stdin, stdout=stdout, stderr=stderr,
        text=True, errors="backslashreplace", pass_fds=pass_fds, start_new_session=start_new_session,
        restore_signals=not ignores_sigpipe,
    )  # fmt: skip


def finish(
    process: Running,
    timeout: float = TIMEOUT,
    input: str | None = None,  # noqa: A002 - subprocess calls it so
) -> Done:
    """Wait for the end of a program and return its output.

    It is killed after `timeout` seconds, and also when the wait is interrupted, as by the test's time limit.
    """
    with process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException as error:
            kill(process)
            if isinstance(error, TimeoutExpired):
                raise TimedOut(_told(process, f"killed after {timeout:g} s", *_rest(process))) from None
            error.add_note(_told(process, "killed", *_rest(process)))
            raise
    return CompletedProcess(process.args, process.returncode, out, err)


def kill(process: Running) -> None:
    """Kill a program. If it leads a process group, as in a new session, kill all processes of the group."""
    if process.returncode is None and os.getpgid(process.pid) == process.pid:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def mpiexec() -> str:
    """Return the path of mpiexec, as a user would find it; skip the test if there is none."""
    import pytest

    if MPIEXEC is None:
        pytest.skip("no mpiexec next to this Python or in PATH")
    return MPIEXEC


def _rest(process: Running) -> tuple[str | bytes | None, str | bytes | None]:
    try:
        return process.communicate(timeout=GRACE)
    except TimeoutExpired as held:  # this exception has the output as bytes
        return held.stdout, held.stderr


def _told(process: Running, what: str, out: str | bytes | None, err: str | bytes | None) -> str:
    lines = [f"{shlex.join(cast(list[str], process.args))}: {what}"]
    for name, printed in (("stdout", out), ("stderr", err)):
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        lines += [] if text is None else [f"{name}:", text]
    return "\n".join(lines)
