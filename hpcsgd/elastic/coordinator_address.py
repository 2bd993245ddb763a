"""How separately started replica groups find their coordinator: a file in the folder of each term.

A term is the time of one coordinator. The next coordinator may run on another node. The file has the
coordinator's address and the run's token, so only its owner may read it. It is written under another name and
then renamed, so that it is never incomplete. All terms have the same token, because connections between
replica groups outlive coordinators.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcsgd.comm import PeerLost
from hpcsgd.elastic.handshake import CHALLENGE, COORDINATOR, PROOF, challenge, place, proof, require
from hpcsgd.elastic.journal import last_claimed
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import replacing
from hpcsgd.files.reading import parsed
from hpcsgd.files.shared import text_of

NAME = "address.json"
PAUSE = 0.25
"""Seconds between two reads of the file."""


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address of the coordinator of one term, and the token of the run."""

    address: str
    """host:port; empty once the coordinator has left, so that the next one starts at once."""
    token: str

    def publish(self, terms: Path, term: int) -> None:
        """Write the file of term `term` in the folder `terms`, readable by its owner only."""
        with replacing(terms / str(term) / NAME) as part:
            part.touch(0o600)
            part.write_text(json.dumps(asdict(self)))

    async def answers(self, patience: float) -> bool:
        """Return True if a coordinator that knows the token answers within `patience` seconds."""
        with suppress(OSError, EOFError, TimeoutError):
            await asyncio.wait_for(self._greet(), patience)
            return True
        return False

    async def _greet(self) -> None:
        host_name, port = self.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host_name, int(port))
        at = place(COORDINATOR, writer.get_extra_info("sockname"), writer.get_extra_info("peername"))
        try:
            host, client = await reader.readexactly(CHALLENGE), challenge()
            writer.write(client + proof(self.token, "client", at, host, client))
            require(self.token, "host", at, host, client, await reader.readexactly(PROOF))
        finally:
            writer.close()


def of_term(terms: Path, term: int) -> CoordinatorAddress | None:
    """Return the coordinator's address in term `term`; None if the coordinator has not published it yet."""
    path = terms / str(term) / NAME
    text = text_of(path)
    try:
        return None if text is None else CoordinatorAddress(**parsed(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not where a coordinator is, or damaged: {error}") from error


def token_for(terms: Path, term: int) -> str:
    """Return the token of the terms before `term`, or a new token if none has published one."""
    for earlier in range(term - 1, 0, -1):
        if (found := of_term(terms, earlier)) is not None:
            return found.token
    return secrets.token_hex(32)


def awaited(coordinator: str, patience: float) -> str:
    """Return `address(coordinator)` once a coordinator runs. Raises `PeerLost` after `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        try:
            return address(coordinator)
        except ConnectionError as error:
            if time.monotonic() > until:
                raise PeerLost(f"{error}, for {patience:g} s") from error
            time.sleep(PAUSE)


def moves(coordinator: str) -> bool:
    """Return True if `coordinator` is a folder of terms, so that the coordinator's address may change."""
    return os.path.isabs(coordinator)


def address(coordinator: str) -> str:
    """Return host:port of `coordinator`, which is host:port itself or the folder of all terms.

    Raises `ConnectionError` if no coordinator runs at the moment.
    """
    if not moves(coordinator):
        return coordinator
    terms = Path(coordinator)
    found = of_term(terms, last_claimed(terms))
    if found is None or not found.address:
        raise ConnectionError(f"{terms} has no address of a running coordinator")
    return found.address
