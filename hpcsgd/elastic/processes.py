"""Which processes have run each replica group, so that those of an earlier start cannot return."""

from __future__ import annotations

from collections import defaultdict

from hpcsgd.elastic.connection import Connection


class Processes:
    """A record of which processes have run each replica group, in the order in which they first connected.

    All processes of one start of a replica group have the same identifier.
    """

    def __init__(self) -> None:
        self._found: defaultdict[int, list[str]] = defaultdict(list)

    def add(self, client: Connection) -> None:
        """Record the processes at the other end of `client`, a rank's connection to the coordinator.

        The coordinator needs the record to refuse processes whose replica group was started again since.
        """
        found = self._found[client.replica_group]
        if client.processes not in found:
            found.append(client.processes)

    def were_followed(self, client: Connection) -> bool:
        """Return True if newer processes than those of `client` have run its replica group.

        This may happen if a group's launcher died, and the group was started again.
        """
        return client.processes in self._found[client.replica_group][:-1]
