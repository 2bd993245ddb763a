"""What a client does when its connection breaks; the test acts as the coordinator."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN
from hpcsgd.elastic.client import Client
from hpcsgd.elastic.handshake import COORDINATOR, welcome
from hpcsgd.elastic.register import Phase, Register

HELLO = {"replica_group": 0, "rank": 0, "ranks": 1, "life": "first"}
NOW = Register(1, 7, 7, Phase.RUN)


def test_what_was_said_last_is_said_again_on_a_new_connection() -> None:
    heard: list[dict[str, Any]] = []

    def converse(listener: socket.socket) -> None:
        """Receive the client's requests on two connections, and answer only on the second one."""
        for _ in range(2):
            connection, _ = listener.accept()
            with connection, connection.makefile("r") as lines:
                welcome(connection, TOKEN, COORDINATOR)
                connection.sendall(json.dumps({"register": NOW.to_json()}).encode() + b"\n")
                said = (json.loads(line) for line in lines)
                heard.append(next(said))
                heard.append(next(each for each in said if each["do"] != "beat"))
                if len(heard) == 4:
                    after = replace(NOW, phase=Phase.FINISHED)
                    connection.sendall(json.dumps({"register": after.to_json()}).encode() + b"\n")
                    assert not list(said)

    changes: list[Register | None] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(30)
        served = pool.submit(converse, listener)
        address = "{}:{}".format(*listener.getsockname())
        client = Client(
            address, TOKEN, HELLO, heartbeat_timeout=HEARTBEAT_TIMEOUT, patience=30, on_change=changes.append
        )
        client.finish(1)
        assert client.last.phase is Phase.FINISHED, "it has waited for that"
        client.close()
        served.result(60)
    finish = {"do": "finish", "generation": 1}
    assert heard == [HELLO, finish, HELLO, finish]
    assert [now and now.phase for now in changes] == [Phase.RUN, Phase.RUN, Phase.FINISHED]
