"""Pack the Python environment into one file, which each node of a job reads once.

Without a pack, each rank opens thousands of files on a shared file system.
"""

from hpcsgd.cluster.environment.contents import Environment, ask
from hpcsgd.cluster.environment.pack import Packed, changed_since, pack

__all__ = ["Environment", "Packed", "ask", "changed_since", "pack"]
