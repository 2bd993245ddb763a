"""Python programs that tests start, without the three seconds that importing torch takes."""

from __future__ import annotations

import atexit
import functools
import sys
import tempfile
import time
from pathlib import Path

import programs

HERE = Path(__file__).parent


def python(*words: str, imported: str = "") -> list[str]:
    """Return a command that does the same as `python` with `words`: `-m` and a module, or a file.

    Its process has imported torch already, and the module `imported` if one is given.
    """
    return [sys.executable, "-I", "-S", str(HERE / "forked.py"), _server(imported), *words]


@functools.cache
def _server(imported: str) -> str:
    """Start a fork server that runs as long as this process, and return its address."""
    folder = tempfile.TemporaryDirectory()
    address = Path(folder.name) / "fork-server"
    server = fork_server(address, *filter(None, [imported]))

    def end() -> None:
        if programs.finish(server).returncode != 0:
            print(f"fork_server.py failed\n{_printed(address).read_text()}", file=sys.stderr)
        folder.cleanup()

    atexit.register(end)
    return str(address)


def fork_server(address: Path, *modules: str) -> programs.Running:
    """Start fork_server.py, which imports `modules`, serves at `address`, and ends when its stdin does."""
    with _printed(address).open("w") as output:
        server = programs.start(
            [sys.executable, str(HERE / "fork_server.py"), str(address), *modules],
            stdin=programs.PIPE,
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + programs.TIMEOUT
    while not address.exists():
        assert server.poll() is None, f"fork_server.py ended\n{_printed(address).read_text()}"
        assert time.monotonic() < deadline, "fork_server.py does not begin to serve"
        time.sleep(0.02)
    return server


def _printed(address: Path) -> Path:
    return Path(f"{address}.printed")
