"""The coordinator's end of the connection to one rank."""

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
    """The coordinator's connection to one rank of a replica group.

    A `life` is one stay of the replica group in the run, as a text that is the same for all its ranks. The
    part of the text before the dot identifies the group's processes. `heard` is the coordinator's clock when
    the last message arrived.
    """

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
        """Queue `message` for sending and return, so that a client that does not read blocks no other one."""
        self.writer.write(json.dumps(message).encode() + b"\n")


async def greeted(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, watch: Watch
) -> Connection:
    """Do the handshake with a client, and return its connection once it has identified itself.

    Raises `OSError`, `EOFError`, `ValueError`, `KeyError` or `TypeError` for a client that does not know the
    token or sends something else.
    """
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
