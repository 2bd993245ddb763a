"""The Python environment in one file, which each node of a job reads once; else each rank opens thousands."""

from hpcsgd.cluster.environment.contents import Environment, ask
from hpcsgd.cluster.environment.pack import Packed, changed_since, pack

__all__ = ["Environment", "Packed", "ask", "changed_since", "pack"]
