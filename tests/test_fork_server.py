"""The server that starts programs for tests: a program has the files that were sent for it, and no others."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

import programs
from pythons import fork_server

OPEN = """
import gc, os, time
gc.collect()
print(sum(os.path.exists(f"/proc/self/fd/{number}") for number in range(40)), flush=True)
time.sleep(600)
"""
ROUNDS = 5


class Client:
    """A client that asks, as forked.py does, for a program that prints how many of forty files are open."""

    def __init__(self, folder: Path) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(programs.TIMEOUT)
        self._connection.connect(str(folder / "server"))
        self._printed, writing = os.pipe()
        order = {
            "words": [str(folder / "open.py")],
            "folder": str(folder),
            "environment": {},
            "numbers": list(range(40)),
            "ignored": [],
        }
        socket.send_fds(self._connection, [json.dumps(order).encode()], [writing] * 40)
        os.close(writing)

    def open_files(self) -> int:
        self._connection.recv(64)  # the program has been forked
        return int(os.read(self._printed, 64))

    def close(self) -> None:
        """Close the connection, as if this client had been killed."""
        self._connection.close()
        os.close(self._printed)


@pytest.mark.slow
def test_a_client_that_was_killed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Otherwise the next program would inherit the socket of the killed client.

    It would close the socket's number late, when another file may have this number.
    """
    (tmp_path / "open.py").write_text(OPEN)
    server = fork_server(tmp_path / "server")
    try:
        client = Client(tmp_path)
        assert client.open_files() == 40
        for _ in range(ROUNDS):
            server.send_signal(signal.SIGSTOP)
            client.close()
            client = Client(tmp_path)
            server.send_signal(signal.SIGCONT)  # it learns of the lost client and of the next one at once
            assert client.open_files() == 40
        client.close()
    finally:
        programs.finish(server)
