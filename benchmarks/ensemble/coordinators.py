"""Start a coordinator in its own process, as `hpcsgd launch` does, for groups that a benchmark starts."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness import programs


@contextmanager
def coordinator(
    replica_groups: int, folder: Path, *, host: str = "127.0.0.1", launcher: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Run a coordinator that listens at `host`; yield the command-line arguments for its groups.

    It ends with the context.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "replica_groups": replica_groups,
        "token": secrets.token_hex(16),
        "heartbeat_timeout": 10.0,
        "timeout": 300.0,
    }
    told |= {"folder": str(folder), "host": host, "port": 0}
    command = [*launcher, sys.executable, "-m", "hpcsgd.elastic"]
    with (
        (folder / "coordinator.log").open("w") as log,
        programs.start(command, stdin=programs.PIPE, stdout=programs.PIPE, stderr=log) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(told), file=process.stdin, flush=True)
        try:
            address = process.stdout.readline().strip()
            yield ["--coordinator", address, "--token", str(told["token"])]
        finally:
            process.stdin.close()  # the coordinator ends when its stdin is closed
            process.wait()
