"""mpi4py's `MPI` without its warning about launchers; `mpi.world` reports that problem, with a remedy."""

from __future__ import annotations

import warnings

from hpcsgd.comm.backend import first_line

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # Importing this module starts MPI. Without MPI no other rank can be reached, so each
        # process reports it.
        raise SystemExit(
            f"hpcsgd: no MPI library can be loaded ({first_line(error)}): load the machine's MPI module, "
            "install one by `pip install hpcsgd[mpich]`, or start with torchrun, which needs none"
        ) from error

__all__ = ["MPI"]
