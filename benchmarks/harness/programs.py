"""Start programs of benchmarks, with an empty stdin and a time limit.

Hydra's mpiexec forwards its stdin to rank 0, and also the end of it. It dies of SIGPIPE if that rank has
already ended, which happens on busy cores. `restore_signals=False` makes programs ignore SIGPIPE, as Python
does.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

Command = Sequence[str | Path]
Program = subprocess.Popen[str]
PIPE = subprocess.PIPE
TAIL = 10_000
"""Characters that an error quotes of each of stdout and stderr."""


class Failed(SystemExit):
    """A program failed or did not end in time. The text has its command, the reason and what it printed."""


def run(
    command: Command, *, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    capture: bool = True, check: bool = True,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program until it ends, with nothing on its stdin.

    It is killed, and `Failed` is raised, if it takes longer than `timeout` seconds. With `check`, `Failed` is
    also raised if its exit code is not 0. With `capture`, its output is in the result and in the error;
    without, it goes to the caller's own stdout and stderr. A missing program raises `FileNotFoundError`.
    """
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=capture, text=True,
            timeout=timeout, check=False, restore_signals=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise Failed(_told(command, f"not over after {timeout:g} s", late.stdout, late.stderr)) from None
    if check and done.returncode != 0:
        raise Failed(_told(command, f"code {done.returncode}", done.stdout, done.stderr))
    return done


def start(
    command: Command, *, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL, stdout: int | IO[str] | None = None, stderr: int | IO[str] | None = None,
    start_new_session: bool = False,
) -> Program:  # fmt: skip
    """Start a program and return while it runs; the caller has to end it.

    Its stdin is empty unless the caller passes `PIPE`. Its output goes to the caller's own stdout and stderr
    unless `stdout` and `stderr` say otherwise. A caller that passes `PIPE` for them has to read it.
    """
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=True,
        start_new_session=start_new_session,
    )  # fmt: skip


def _told(command: Command, reason: str, *printed: str | bytes | None) -> str:
    """Return the text of an error. Where a program was killed, Python gives what it printed as bytes."""
    texts = [text.decode(errors="replace") if isinstance(text, bytes) else text for text in printed if text]
    return "\n".join([f"{shlex.join(map(str, command))}: {reason}", *(x[-TAIL:].rstrip() for x in texts)])
