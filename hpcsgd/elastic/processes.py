"""Which processes have run each replica group, so that those of an earlier start cannot return."""

from __future__ import annotations

from collections import defaultdict

from hpcsgd.elastic.connection import Connection


class Processes:
    """The identifiers of the processes that have run each replica group, in order of start."""

    def __init__(self) -> None:
        self._found: defaultdict[int, list[str]] = defaultdict(list)

    def add(self, client: Connection) -> None:
        """Record the processes of `client`."""
        found = self._found[client.replica_group]
        if client.processes not in found:
            found.append(client.processes)

    def were_followed(self, client: Connection) -> bool:
        """Return True if newer processes run the client's group, for example after its launcher died."""
        return client.processes in self._found[client.replica_group][:-1]
