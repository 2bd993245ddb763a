"""The only place that talks to other ranks."""

from hpcsgd.transport.backend import ANY, Backend, PeerLost, Reduction
from hpcsgd.transport.base import Transport
from hpcsgd.transport.ending import guard, leave_together
from hpcsgd.transport.lane import Lane, Work
from hpcsgd.transport.recording import Ledger, Total, phase

__all__ = [
    "ANY",
    "Backend",
    "Lane",
    "Ledger",
    "PeerLost",
    "Reduction",
    "Total",
    "Transport",
    "Work",
    "guard",
    "leave_together",
    "phase",
]  # fmt: skip
