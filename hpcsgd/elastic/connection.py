"""One rank's connection, as the coordinator has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcsgd.elastic.handshake import CHALLENGE, COORDINATOR, PROOF, challenge, place, proof, require
from hpcsgd.elastic.watch import Watch


@dataclass(eq=False)
class Connection:
    """A rank's connection. A `life` is one stay of an island, the same for all its ranks, and names their
    processes, up to a dot."""

    replica_group: int
    rank: int
    ranks: int
    life: str
    writer: asyncio.StreamWriter
    heard: float

    @property
    def processes(self) -> str:
        return self.life.partition(".")[0]

    def tell(self, message: Mapping[str, Any]) -> None:
        """Queued: a client that does not listen holds up nobody."""
        self.writer.write(json.dumps(message).encode() + b"\n")


async def greeted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, watch: Watch
) -> Connection:
    """Of a client that has proved that it knows the token, and said who it is. Raises what a stranger may
    cause: `OSError`, `EOFError`, `ValueError`, `KeyError`, `TypeError`."""
    at = place(COORDINATOR, writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
    host = challenge()
    writer.write(host)
    client, given = await reader.readexactly(CHALLENGE), await reader.readexactly(PROOF)
    require(token, "client", at, host, client, given)
    writer.write(proof(token, "host", at, host, client))
    hello = json.loads(await reader.readline())
    return Connection(
        hello["replica_group"], hello["rank"], hello["ranks"], hello["life"], writer, heard=watch.look()
    )
