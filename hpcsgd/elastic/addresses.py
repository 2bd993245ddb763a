"""By which addresses nodes reach each other."""

from __future__ import annotations

import socket

from hpcsgd.errors import UserError


def of_node(name: str) -> str:
    """The address of a node, as the names are known here; this node's where that one is unknown."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def require_own(host: str) -> None:
    """Raises `UserError` unless somebody can listen there, on this node."""
    try:
        socket.create_server((host, 0)).close()
    except OSError as error:
        raise UserError(f"--host {host}: nobody can listen there: {error.strerror}") from error


def own_towards(coordinator: str) -> str:
    """Of this node, on the network where the coordinator (host:port) is."""
    host, port = coordinator.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]
