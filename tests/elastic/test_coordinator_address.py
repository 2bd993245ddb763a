"""Groups find a coordinator that moves by a file that only their owner may read."""

from __future__ import annotations

import asyncio
import re
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.conftest import TOKEN, Desk
from hpcsgd.comm import PeerLost
from hpcsgd.elastic import addresses, coordinator_address
from hpcsgd.elastic.coordinator_address import CoordinatorAddress, of_term, token_for
from hpcsgd.elastic.journal import claim


def test_the_newest_term_says_where(tmp_path: Path) -> None:
    nowhere = re.escape(f"{tmp_path} has no address of a running coordinator")
    with pytest.raises(ConnectionError, match=nowhere):
        coordinator_address.address(str(tmp_path))
    claim(tmp_path, 1)
    assert of_term(tmp_path, 1) is None
    CoordinatorAddress("10.0.0.1:5000", "a token").publish(tmp_path, 1)
    assert coordinator_address.address(str(tmp_path)) == "10.0.0.1:5000"
    assert stat.S_IMODE((tmp_path / "1" / "address.json").stat().st_mode) == 0o600
    claim(tmp_path, 2)
    with pytest.raises(ConnectionError, match=nowhere):
        coordinator_address.address(str(tmp_path))
    CoordinatorAddress("", "a token").publish(tmp_path, 2)
    with pytest.raises(ConnectionError, match=nowhere):
        coordinator_address.address(str(tmp_path))
    assert coordinator_address.address("10.0.0.2:5000") == "10.0.0.2:5000"


@pytest.mark.usefixtures("forgetful")
def test_what_nfs_remembers_is_not_believed(tmp_path: Path) -> None:
    """Another node publishes its coordinator's address after this one has looked."""
    claim(tmp_path, 1)
    assert of_term(tmp_path, 1) is None
    (tmp_path / "1" / "address.json").write_bytes(b'{"address": "10.0.0.1:5000", "token": "a token"}')
    assert coordinator_address.address(str(tmp_path)) == "10.0.0.1:5000"


def test_an_group_that_starts_while_the_coordinator_moves(tmp_path: Path) -> None:
    claim(tmp_path, 1)
    with pytest.raises(PeerLost, match="has no address of a running coordinator, for 0 s"):
        coordinator_address.awaited(str(tmp_path), 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(coordinator_address.awaited, str(tmp_path), 60)
        CoordinatorAddress("10.0.0.1:5000", "a token").publish(tmp_path, 1)
        assert waiting.result(60) == "10.0.0.1:5000"


def test_the_token_is_that_of_the_run(tmp_path: Path) -> None:
    claim(tmp_path, 1)
    first = token_for(tmp_path, 1)
    assert len(first) == 64
    assert token_for(tmp_path, 1) != first
    CoordinatorAddress("10.0.0.1:5000", first).publish(tmp_path, 1)
    claim(tmp_path, 2)  # publishes no address
    assert token_for(tmp_path, 3) == first


def test_a_node_has_the_address_on_the_network_of_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses.own_towards("127.0.0.1:9") == "127.0.0.1"
    known = {"node1": "10.0.0.1", socket.gethostname(): "10.0.0.2"}

    def by_name(name: str) -> str:
        if name not in known:
            raise OSError(name)
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", by_name)
    assert [addresses.of_node(name) for name in ("node1", "node9")] == ["10.0.0.1", "10.0.0.2"]


def test_only_a_coordinator_of_this_run_answers(desk: Desk) -> None:
    def answers(address: str, token: str) -> bool:
        return asyncio.run(CoordinatorAddress(address, token).answers(5))

    with desk.coordinator(1) as at:
        assert answers(at.address, TOKEN)
        assert not answers(at.address, "of another run")
    assert not answers(at.address, TOKEN), "it has ended"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        assert not asyncio.run(CoordinatorAddress(address, TOKEN).answers(0.2))
