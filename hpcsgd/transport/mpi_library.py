"""mpi4py's `MPI`, without its warning about launchers: `mpi.world` tells the same, and what to do."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
    from mpi4py import MPI

__all__ = ["MPI"]
