"""The ranks of a job without MPI: they connect once, communicate by gloo, and leave together."""

from __future__ import annotations

import itertools
import os
import threading

from hpcsgd.comm.backend import Backend
from hpcsgd.comm.by_device import ByDevice
from hpcsgd.comm.comm_thread import know_processor
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.connections import Connections
from hpcsgd.comm.gloo import GlooBackend
from hpcsgd.comm.mailed_reports import MailedReports
from hpcsgd.comm.place import Place
from hpcsgd.comm.rank_watch import WORLD, Member
from hpcsgd.comm.rendezvous import connect
from hpcsgd.comm.shutdown import GRACE, close_at_the_end, guard
from hpcsgd.errors import forget_exit_code
from hpcsgd.launcher import RESTARTS


def world(place: Place, timeout: float) -> Communicator:
    """Return a communicator of all ranks that connect at `place`; they end together. Raises `NoWorld`."""
    know_processor()
    connections = None if place.size == 1 else _connected(place, timeout)
    node = 0 if connections is None else connections.nodes[place.rank]
    backend = GlooBackend(connections, f"world {next(_worlds)}", place.rank, place.size, node)
    comm = Communicator(ByDevice(backend), timeout=timeout)
    ending = guard(comm)
    if connections is None:
        return comm
    if ending is None:
        # `guard` has been called for another world, whose `Shutdown` does not close these connections.
        if not connections.is_attended:
            connections.is_attended = True
            _partings.append(_Parting(connections, backend.split(0, backend.rank)))
            close_at_the_end(_partings[-1])
        return comm
    connections.is_attended = True
    watch = ending.watched(MailedReports(connections, ending.fail))
    member = Member(watch, WORLD, range(comm.size))
    return Communicator(comm.backend, timeout=timeout, comm_thread=comm.comm_thread, member=member)


class _Parting:
    """This rank's connections; `close` waits until all ranks leave, `GRACE` s at most, and closes them."""

    def __init__(self, connections: Connections, ranks: Backend) -> None:
        self._connections, self._ranks = connections, ranks

    def close(self) -> None:
        gathering = threading.Thread(target=self._ranks.gather_objects, args=(None,), daemon=True)
        gathering.start()
        gathering.join(GRACE)
        self._connections.close(GRACE)


_partings: list[_Parting] = []
_worlds = itertools.count()
_all_connections: list[Connections] = []


def _connected(place: Place, timeout: float) -> Connections:
    """Return this rank's connections; ranks connect only once, however many worlds they make."""
    if not _all_connections:
        if place.rank == 0 and os.environ.get(RESTARTS, "0") != "0":
            forget_exit_code()
        _all_connections.append(connect(place, timeout, os.environ))
    return _all_connections[0]
