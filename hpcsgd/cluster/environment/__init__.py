"""The Python environment in one file, which each node reads once.

Otherwise each rank opens thousands of files.
"""

from hpcsgd.cluster.environment.contents import Environment, ask
from hpcsgd.cluster.environment.pack import Packed, changed_since, pack

__all__ = ["Environment", "Packed", "ask", "changed_since", "pack"]
