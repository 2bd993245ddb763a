"""The only place that talks to other ranks."""

from hpcsgd.comm.backend import ANY, Backend, PeerLost, Reduction, wide
from hpcsgd.comm.base import Transport
from hpcsgd.comm.deadlock import Deadlock
from hpcsgd.comm.ending import guard, leave_together
from hpcsgd.comm.lane import Lane, Work
from hpcsgd.comm.recording import Ledger, Total, doing, phase
from hpcsgd.comm.service import Asked, Service

__all__ = [
    "ANY",
    "Asked",
    "Backend",
    "Deadlock",
    "Lane",
    "Ledger",
    "PeerLost",
    "Reduction",
    "Service",
    "Total",
    "Transport",
    "Work",
    "doing",
    "guard",
    "leave_together",
    "phase",
    "wide",
]  # fmt: skip
