"""What a process that trains sets for itself: threads, operations, what becomes of freed memory, what it
tells."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hpcsgd.comm import Communicator, joining, streams
from hpcsgd.config.schema import load
from hpcsgd.errors import UserError

CUBLAS_WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With which its matrix products give the same bits; torch refuses them without."""

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 1 << 25  # bytes; some versions refuse more


def world_for(path: Path, overrides: Sequence[str]) -> Communicator:
    """All ranks, by the backend that the job file names. What is wrong with the file all of them say later:
    they have to be one world for that."""
    try:
        backend = load(path, overrides).parallel.backend
    except UserError:
        backend = "auto"
    return joining.world(backend=backend)


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next step.

    By default glibc gives the activations of every step back to the kernel and faults their pages in anew.
    Does nothing where the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, ctypes.c_int(2**31 - 1))


def use_threads(threads: int | None) -> None:
    """As many as asked for, here or by OMP_NUM_THREADS, which torch has read; else one, and not all cores."""
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or 1)


def compute_alike(deterministic: bool) -> None:
    """Where asked for, only by operations that give the same bits every time; others raise, and say so.

    Before anything is computed on a device: what cuBLAS works with is fixed then.
    """
    if deterministic:
        os.environ.setdefault(*CUBLAS_WORKSPACES)
        torch.use_deterministic_algorithms(True)
        streams.choose_no_kernels_by_time()


def log_to_stdout(rank: int) -> None:
    """Rank 0 tells; what the others have to say they raise."""
    package = logging.getLogger("hpcsgd")
    package.setLevel(logging.DEBUG if rank == 0 else logging.ERROR)
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
