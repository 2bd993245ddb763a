"""Run a target of the Makefile in conditions in which test suites are known to fail, and print a table.

    python tests/conditions.py [--target test] [--user NAME] [--log FOLDER] [CONDITION ...]

Without names, the program tries all conditions one after the other. It skips those in OF_ROOT unless root
runs it. For the condition "another user" it clones the repository, and make creates the environment again.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import programs

ROOT = Path(__file__).parents[1]
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
SILENT_SERVER = "127.0.0.77"
PATIENCE = 7200.0  # seconds that a target may take


@dataclass
class Start:
    """How make is started. A condition changes some of the attributes."""

    user: str
    folder: Path
    before: Sequence[str | Path] = ()  # words before those of make
    root: Path = ROOT
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))


Condition = Callable[[Start], Iterator[None]]  # as `contextmanager` takes it


def shell(text: str) -> Condition:
    """Return a condition in which bash runs `text`, which starts the command at its `$@`."""

    def condition(start: Start) -> Iterator[None]:
        start.before = ["bash", "-c", text, "bash"]
        yield

    return condition


def open_pipe(start: Start) -> Iterator[None]:
    """Hold the writing end of a pipe and write nothing."""
    os.mkfifo(pipe := start.folder / "pipe")
    start.before = ["bash", "-c", 'exec "$@" <"$0"', pipe]
    with pipe.open("rb+", buffering=0):  # opening it only for writing would wait for the reader
        yield


def busy(start: Start) -> Iterator[None]:
    """Keep four cores busy."""
    with ExitStack() as ending:
        for _ in range(4):
            process = ending.enter_context(programs.start([sys.executable, "-S", "-c", BUSY]))
            ending.callback(process.kill)
        yield


def blanks(start: Start) -> Iterator[None]:
    for name in ("HOME", "TMPDIR"):
        start.environment[name] = mkdtemp(prefix="a place ", dir=start.folder)
    yield


def silent_name_server(start: Start) -> Iterator[None]:
    """Bind the port of a name server and never answer."""
    (file := start.folder / "resolv.conf").write_text(f"nameserver {SILENT_SERVER}\n")
    text = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    start.before = ["unshare", "--mount", "bash", "-c", text, file]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((SILENT_SERVER, 53))
        yield


def another_user(start: Start) -> Iterator[None]:
    start.root = start.folder / "clone"
    programs.run(["git", "clone", "-q", ROOT, start.root])
    programs.run(["chown", "-R", start.user, start.root])
    start.before = ["runuser", "-u", start.user, "--", "env", "--unset=TMPDIR", f"HOME={start.root}"]
    yield


OF_ROOT: Mapping[str, Condition] = {"silent name server": silent_name_server, "another user": another_user}
CONDITIONS: Mapping[str, Condition] = {
    "quiet": shell('exec "$@"'),
    "four busy loops": busy,
    "stdin a terminal": shell(f'exec "{sys.executable}" -c "{TERMINAL}" "$@"'),
    "stdin closed": shell('exec "$@" <&-'),
    "stdin /dev/null": shell('exec "$@" </dev/null'),
    "stdin a pipe that ends": shell('true | "$@"'),
    "stdin a pipe that stays open": open_pipe,
    "no terminal": shell('exec setsid "$@" </dev/null'),
    "HOME and TMPDIR with a blank": blanks,
    "256 open files": shell('ulimit -n 256; exec "$@"'),
    **OF_ROOT,
}


def tried(name: str, target: str, user: str, log: Path) -> tuple[int, float]:
    """Run the target in a condition; return its exit code and the seconds that it took."""
    with TemporaryDirectory(prefix="conditions-") as folder, log.open("w") as file:
        Path(folder).chmod(0o711)  # other users need to reach what is inside
        start = Start(user, Path(folder))
        with contextmanager(CONDITIONS[name])(start):
            words, began = [*start.before, "make", "-C", start.root, target], time.monotonic()
            outside = {"env": start.environment, "stdin": sys.stdin, "stdout": file}
            process = programs.start(words, **outside, stderr=programs.STDOUT)
            with suppress(programs.TimeoutExpired):
                process.wait(PATIENCE)
            programs.kill(process)
            return process.wait(), time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("conditions", nargs="*", metavar="CONDITION")
    parser.add_argument("--target", default="test")
    parser.add_argument("--user", default="nobody")
    parser.add_argument("--log", type=Path, default=ROOT / "runs" / "conditions")
    given = parser.parse_args()
    if unknown := set(given.conditions) - CONDITIONS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such condition. Allowed: {', '.join(CONDITIONS)}")
    given.log.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in given.conditions or CONDITIONS:
        if name in OF_ROOT and os.getuid() != 0:
            print(f"{given.target:10} {name:32} not tried: it needs root")
            continue
        log = given.log / f"{given.target}-{name.replace(' ', '-').replace('/', '')}.log"
        code, seconds = tried(name, given.target, given.user, log)
        failed += code != 0
        print(f"{given.target:10} {name:32} {seconds:6.0f} s  exit code {code}  {log}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
