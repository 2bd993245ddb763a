"""Python programs that tests start, without the three seconds that torch takes to be imported."""

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
    """The command of a process that does as `python` with these words: `-m` and a module, or a file.

    It has the module `imported` already, as well as torch.
    """
    return [sys.executable, "-I", "-S", str(HERE / "forked.py"), _server(imported), *words]


@functools.cache
def _server(imported: str) -> str:
    """Start a fork server, for as long as this process lives; its address."""
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
