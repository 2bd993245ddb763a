"""Communication between ranks; only this package sends data to other ranks."""

from hpcsgd.comm.backend import ANY, Backend, PeerLost, Reduction, accumulation_dtype
from hpcsgd.comm.comm_thread import CommThread, Work
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.deadlock import Deadlock
from hpcsgd.comm.request_server import PendingRequest, RequestServer
from hpcsgd.comm.shutdown import exit_all, guard
from hpcsgd.comm.stats import CommStats, Total, doing, phase

__all__ = [
    "ANY",
    "Backend",
    "CommStats",
    "CommThread",
    "Communicator",
    "Deadlock",
    "PeerLost",
    "PendingRequest",
    "Reduction",
    "RequestServer",
    "Total",
    "Work",
    "accumulation_dtype",
    "doing",
    "exit_all",
    "guard",
    "phase",
]  # fmt: skip
