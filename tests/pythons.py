"""Python programs that tests start, without the three seconds that torch takes to be imported."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE = 100.0  # seconds; the machine may be busy


def python(*words: str) -> list[str]:
    """The command of a process that does as `python` with these words: `-m` and a module, or a file."""
    return [sys.executable, "-I", "-S", str(HERE / "forked.py"), _server(), *words]


@functools.cache
def _server() -> str:
    """Start a fork server, for as long as this process lives; its address."""
    folder = tempfile.TemporaryDirectory()
    address = Path(folder.name) / "fork-server"
    server = fork_server(address)

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return str(address)


def fork_server(address: Path) -> subprocess.Popen[bytes]:
    """Start fork_server.py, which serves at `address` and ends when its stdin does."""
    server = subprocess.Popen(
        [sys.executable, str(HERE / "fork_server.py"), str(address)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + PATIENCE
    while not address.exists():
        assert server.poll() is None, "fork_server.py ended"
        assert time.monotonic() < deadline, "fork_server.py does not begin to serve"
        time.sleep(0.02)
    return server
