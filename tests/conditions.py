"""Run a target of the Makefile in conditions in which test suites are known to fail, and print a table.

    python tests/conditions.py [--target test] [--user NAME] [--log FOLDER] [CONDITION ...]

Without names, all conditions are tried one after the other. Those in NEED_ROOT are passed over without root.
For another user, what is committed is cloned, and the environment is made again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import programs

ROOT = Path(__file__).parents[1]
SPIN = "while True: pass"
SILENT_SERVER = "127.0.0.77"


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    spinning = [programs.start([sys.executable, "-S", "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            programs.kill(process)
            process.communicate()


@contextlib.contextmanager
def silent_name_server() -> Iterator[None]:
    """Bind the port of a name server and never answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((SILENT_SERVER, 53))
        yield


def shell(text: str) -> Callable[[list[str]], list[str]]:
    """Return a function that puts a command where `text` has `$@`."""
    return lambda command: ["bash", "-c", text, "bash", *command]


def as_it_is(command: list[str]) -> list[str]:
    return command


def on_a_terminal(command: list[str]) -> list[str]:
    code = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    return [sys.executable, "-c", code, *command]


Wrapper = Callable[[list[str]], list[str]]
WRAPPERS: Mapping[str, Wrapper] = {
    "quiet": as_it_is,
    "four busy loops": as_it_is,
    "stdin a terminal": on_a_terminal,
    "stdin closed": shell('exec "$@" <&-'),
    "stdin /dev/null": shell('exec "$@" </dev/null'),
    "stdin a pipe that ends": shell('true | "$@"'),
    "stdin a pipe that stays open": as_it_is,
    "no terminal": shell('exec setsid "$@" </dev/null'),
    "HOME and TMPDIR with a blank": as_it_is,
    "silent name server": shell(
        """exec unshare --mount bash -c 'mount --bind "$RESOLV" /etc/resolv.conf && exec "$@"' bash "$@" """
    ),
    "256 open files": shell('ulimit -n 256; exec "$@"'),
    "another user": as_it_is,
}


NEED_ROOT = {"silent name server", "another user"}
PATIENCE = 7200.0  # seconds that a target may take


def tried(name: str, target: str, user: str, log: Path) -> tuple[int, float]:
    """Run the target in a condition; return its exit code and the seconds that it took."""
    command = ["make", "-C", str(ROOT), target]
    environment = dict(os.environ)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conditions-")))
        folder.chmod(0o711)  # other users have to get through
        if name == "four busy loops":
            stack.enter_context(busy(4))
        if name == "silent name server":
            stack.enter_context(silent_name_server())
            environment["RESOLV"] = f"{folder}/resolv.conf"
            Path(environment["RESOLV"]).write_text(f"nameserver {SILENT_SERVER}\n")
        if name == "HOME and TMPDIR with a blank":
            environment |= {"HOME": f"{folder}/a home", "TMPDIR": f"{folder}/a place"}
            for each in ("HOME", "TMPDIR"):
                Path(environment[each]).mkdir()
        if name == "another user":
            clone = folder / "clone"
            programs.run(["git", "clone", "-q", ROOT, clone])
            programs.run(["chown", "-R", user, clone])
            as_user = ["runuser", "-u", user, "--", "env", "--unset=TMPDIR", f"HOME={clone}"]
            command = [*as_user, "make", "-C", str(clone), target]
        began = time.monotonic()
        with log.open("w") as file:
            stdin = programs.PIPE if name == "stdin a pipe that stays open" else sys.stdin
            words = WRAPPERS[name](command)
            process = programs.start(words, env=environment, stdin=stdin, stdout=file, stderr=programs.STDOUT)
            try:
                code = process.wait(PATIENCE)
            except programs.TimeoutExpired:
                programs.kill(process)
                code = process.wait()
        return code, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("conditions", nargs="*", metavar="CONDITION")
    parser.add_argument("--target", default="test")
    parser.add_argument("--user", default="nobody")
    parser.add_argument("--log", type=Path, default=ROOT / "runs" / "conditions")
    given = parser.parse_args()
    if unknown := set(given.conditions) - WRAPPERS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such condition. Allowed: {', '.join(WRAPPERS)}")
    given.log.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in given.conditions or WRAPPERS:
        if name in NEED_ROOT and os.getuid() != 0:
            print(f"{given.target:10} {name:32} not tried: it needs root")
            continue
        log = given.log / f"{given.target}-{name.replace(' ', '-').replace('/', '')}.log"
        code, seconds = tried(name, given.target, given.user, log)
        failed += code != 0
        print(f"{given.target:10} {name:32} {seconds:6.0f} s  exit code {code}  {log}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
