"""Functions that find the network addresses by which nodes reach each other."""

from __future__ import annotations

import socket

from hpcsgd.errors import UserError


def of_node(name: str) -> str:
    """Return the IP address of the node `name`, or of this node if that name is unknown."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def require_own(host: str) -> None:
    """Raise `UserError` unless a process can listen at `host` on this node."""
    try:
        socket.create_server((host, 0)).close()
    except OSError as error:
        raise UserError(f"--host {host}: cannot listen there: {error.strerror}") from error


def own_towards(coordinator: str) -> str:
    """Return this node's address on the network over which it reaches `coordinator` (host:port)."""
    host, port = coordinator.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]
