"""The only place that talks to other ranks."""

from hpcsgd.transport.backend import ANY, Backend, PeerLost, Reduction, wide
from hpcsgd.transport.base import Transport
from hpcsgd.transport.deadlock import Deadlock
from hpcsgd.transport.ending import guard, leave_together
from hpcsgd.transport.lane import Lane, Work
from hpcsgd.transport.recording import Ledger, Total, doing, phase
from hpcsgd.transport.service import Asked, Service

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
