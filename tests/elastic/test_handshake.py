"""A proof is valid for one connection to one listener, and useless to anyone who relays it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from hpcsgd.elastic.handshake import CHALLENGE, COORDINATOR, PROOF, RING, Unauthenticated, introduce, welcome

TOKEN = "of this run"


def outcomes(
    client: Callable[[socket.socket], None], host: Callable[[socket.socket], None], *, relayed: bool = False
) -> list[str]:
    """Return the results at both ends of a connection, which a stranger in the middle may relay."""
    told = ["", ""]
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_server(("127.0.0.1", 0)) as squatted:

        def answering() -> None:
            connection, _ = door.accept()
            with connection:
                told[1] = _fares(host, connection)

        def passing_on() -> None:
            victim, _ = squatted.accept()
            with victim, socket.create_connection(door.getsockname()) as onward, suppress(OSError):
                victim.sendall(onward.recv(CHALLENGE))
                onward.sendall(victim.recv(CHALLENGE + PROOF, socket.MSG_WAITALL))
                victim.sendall(onward.recv(PROOF, socket.MSG_WAITALL))

        threads = [threading.Thread(target=answering), *[threading.Thread(target=passing_on)] * relayed]
        for thread in threads:
            thread.start()
        with socket.create_connection((squatted if relayed else door).getsockname()) as connection:
            told[0] = _fares(client, connection)
        for thread in threads:
            thread.join()
    return told


def _fares(end: Callable[[socket.socket], None], connection: socket.socket) -> str:
    try:
        end(connection)
    except ConnectionError as error:
        return type(error).__name__
    return "welcome"


@pytest.mark.parametrize("door", [COORDINATOR, RING])
def test_who_knows_the_token_is_welcome(door: str) -> None:
    told = outcomes(lambda c: introduce(c, TOKEN, door), lambda c: welcome(c, TOKEN, door))
    assert told == ["welcome", "welcome"]


def test_another_token_is_not() -> None:
    told = outcomes(lambda c: introduce(c, "guessed", RING), lambda c: welcome(c, TOKEN, RING))
    assert told == ["ConnectionError", Unauthenticated.__name__]


def test_a_host_that_does_not_know_the_token_is_found_out() -> None:
    def host(connection: socket.socket) -> None:
        connection.sendall(bytes(CHALLENGE))
        connection.recv(CHALLENGE + PROOF, socket.MSG_WAITALL)
        connection.sendall(bytes(PROOF))

    assert outcomes(lambda c: introduce(c, TOKEN, RING), host)[0] == Unauthenticated.__name__


def test_a_proof_for_one_door_is_not_good_for_another() -> None:
    told = outcomes(lambda c: introduce(c, TOKEN, COORDINATOR), lambda c: welcome(c, TOKEN, RING))
    assert told == ["ConnectionError", Unauthenticated.__name__]


@pytest.mark.parametrize("door", [COORDINATOR, RING])
def test_a_proof_that_a_stranger_passes_on_is_good_for_nobody(door: str) -> None:
    told = outcomes(lambda c: introduce(c, TOKEN, door), lambda c: welcome(c, TOKEN, door), relayed=True)
    assert told == ["ConnectionError", Unauthenticated.__name__]
