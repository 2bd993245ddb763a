"""The only place that talks to other ranks."""

from hpcsgd.comm.backend import ANY, Backend, PeerLost, Reduction, accumulation_dtype
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.deadlock import Deadlock
from hpcsgd.comm.shutdown import guard, exit_all
from hpcsgd.comm.comm_thread import CommThread, Work
from hpcsgd.comm.stats import CommStats, Total, doing, phase
from hpcsgd.comm.request_server import PendingRequest, RequestServer

__all__ = [
    "ANY",
    "PendingRequest",
    "Backend",
    "Deadlock",
    "Lane",
    "CommStats",
    "PeerLost",
    "Reduction",
    "RequestServer",
    "Total",
    "Transport",
    "Work",
    "doing",
    "guard",
    "exit_all",
    "phase",
    "accumulation_dtype",
]  # fmt: skip
