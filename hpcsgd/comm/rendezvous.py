"""How ranks without MPI connect: each registers at a store, and rank 0 publishes all addresses there.

From then on the ranks use a new store and connections of their own (`hpcsgd.comm.connections`).
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpcsgd import torch_private
from hpcsgd.comm.backend import first_line
from hpcsgd.comm.connections import Connections, RelayAddress
from hpcsgd.comm.deadlock import names
from hpcsgd.comm.place import NoWorld, Place
from hpcsgd.comm.process_group import address_towards, distributed, require_address_of_gloo
from hpcsgd.comm.relay import Relay
from hpcsgd.errors import UserError

PATIENCE = 600.0
"""The least number of seconds that ranks may take to connect, because the machine may start them late."""
KNOWN_AFTER = 60.0
"""Seconds after which the name of the host of rank 0 must be known. Names of containers may come late."""
_MORE = 10.0  # seconds in which the other ranks learn why rank 0 has given up


def connect(place: Place, timeout: float, environ: Mapping[str, str]) -> Connections:
    """Connect all ranks, which call this together, and return this rank's `Connections`.

    Raises `NoWorld` if ranks are missing, or cannot reach each other.
    """
    patience = max(timeout, PATIENCE)
    store = _first_store(place, patience)
    prefix = f"hpcsgd/{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    listening = socket.create_server(("", 0))
    store.set(f"{prefix}/{place.rank}", json.dumps(_oneself(listening)))
    made = Published.of(store, prefix, place.size, patience) if place.rank == 0 else None
    if made is not None:
        store.set(f"{prefix}/world", json.dumps(made.published))
    published = _published(store, f"{prefix}/world", patience + _MORE, place)
    if why := published.get("fault"):
        raise NoWorld(why)
    own_relay = None
    if place.rank in published["relay_ranks"]:
        own_relay = Relay(listening, published["token"])
    else:
        listening.close()
    own = made.store if made is not None else _reached(published["address"], published["port"], patience)
    _kept.append(store)
    relays = [RelayAddress(*address) for address in published["relays"]]
    return Connections(place.rank, published["nodes"], own, patience, own_relay, relays, published["token"])


_kept: list[Any] = []
"""Stores that must stay open, because the script may still use them for its own groups."""


@dataclass(frozen=True)
class Published:
    """What rank 0 publishes once all ranks have registered, and the new store that rank 0 serves."""

    store: Any
    """The new store; None if the ranks cannot connect."""
    published: dict[str, Any]
    """The addresses that all ranks need to connect, or only the key "fault" with an error's message."""

    @classmethod
    def of(cls, store: Any, prefix: str, size: int, patience: float) -> Published:
        """Wait until all ranks have registered at `store`; return what rank 0 has to publish there.

        If ranks are missing after `patience` seconds, or have no address for other nodes, the result is only
        an error message. Every rank then raises `NoWorld` with this message, and does not wait any longer.
        """
        try:
            everybody = _everybody(store, prefix, size, patience)
            return cls.among(everybody, patience)
        except UserError as error:
            return cls(None, {"fault": str(error)})

    @classmethod
    def among(cls, everybody: Sequence[Mapping[str, Any]], patience: float) -> Published:
        """Make the new store, and return it with the addresses that all ranks need to connect.

        `everybody`: what each rank has registered, in rank order. Raises `UserError` if a rank has no address
        that other nodes can reach.
        """
        places = [(each["host"], each["boot"]) for each in everybody]
        nodes = [places.index(place) for place in places]
        others = [each["host"] for each, node in zip(everybody, nodes, strict=True) if node]
        if others and (faults := [each["fault"] for each in everybody if each["fault"]]):
            raise UserError(faults[0])
        address = address_towards(others)
        own = distributed().TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=patience)
        )
        second = next((rank for rank, node in enumerate(nodes) if node), min(1, len(nodes) - 1))
        relays = [(address, everybody[0]["port"])]
        if second:
            host = everybody[second]["host"] if nodes[second] else address
            relays.append((host, everybody[second]["port"]))
        return cls(own, {
            "nodes": nodes, "address": address, "port": own.port, "relays": relays,
            "relay_ranks": [0, second], "token": secrets.token_hex(16),
        })  # fmt: skip


def _first_store(place: Place, patience: float) -> Any:
    """Return the store at which all ranks register. Raises `NoWorld` if this rank does not reach it."""
    if not place.url:
        return torch_private.store_of_default_group()
    _wait_for_name(place, KNOWN_AFTER)
    limit = timedelta(seconds=patience)
    try:
        store, _, _ = next(distributed().rendezvous(place.url, place.rank, place.size, timeout=limit))
    except (RuntimeError, ValueError) as error:
        raise NoWorld(f"rank {place.rank} does not reach {place.url}: {first_line(error)}") from error
    return store


def _wait_for_name(place: Place, seconds: float) -> None:
    """Return once this host knows an address for the name in `place`. Raises `NoWorld` after `seconds`."""
    name = place.url.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except (OSError, UnicodeError) as error:  # the latter if it cannot be a name
            if time.monotonic() >= end:
                raise NoWorld(
                    f"rank {place.rank} on {socket.gethostname()} knows no address for {name!r} "
                    f"({error}): set MASTER_ADDR to a name or address that all nodes know"
                ) from error
        time.sleep(min(1.0, seconds))


def _oneself(listening: socket.socket) -> dict[str, Any]:
    fault = ""
    try:
        require_address_of_gloo()
    except UserError as error:
        fault = str(error)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(), "boot": boot.read_text().strip() if boot.exists() else "",
        "port": listening.getsockname()[1], "fault": fault,
    }  # fmt: skip


def _everybody(store: Any, prefix: str, size: int, patience: float) -> list[dict[str, Any]]:
    end = time.monotonic() + patience
    keys = [f"{prefix}/{rank}" for rank in range(size)]
    for key in keys:
        try:
            store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.1)))
        except RuntimeError:
            missing = [rank for rank, each in enumerate(keys) if not store.check([each])]
            raise UserError(
                f"{size - len(missing)} of {size} ranks have come within {patience:g} s; missing: "
                f"{names(missing)}"
            ) from None
    return [json.loads(store.get(key)) for key in keys]


def _published(store: Any, key: str, patience: float, place: Place) -> dict[str, Any]:
    try:
        store.wait([key], timedelta(seconds=patience))
        return json.loads(store.get(key))
    except RuntimeError as error:
        raise NoWorld(f"rank {place.rank}: rank 0 has not come within {patience:g} s") from error


def _reached(address: str, port: int, patience: float) -> Any:
    TCPStore, limit = distributed().TCPStore, timedelta(seconds=patience)
    try:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise NoWorld(
            f"no way from {socket.gethostname()} to {address}: {first_line(error)}"
        ) from error  # fmt: skip
