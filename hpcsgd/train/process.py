"""Settings of a training process: threads, deterministic operations, memory, logging."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable

import torch

from hpcsgd.comm import Communicator, joining, streams
from hpcsgd.config.schema import Config
from hpcsgd.core.topology import raise_on_all_ranks
from hpcsgd.errors import UserError

CUBLAS_WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""The setting with which cuBLAS gives the same bits every time; torch's deterministic mode needs it."""

# Constants of glibc's <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 1 << 25  # bytes; some versions refuse more


def join_world(read: Callable[[], Config]) -> tuple[Communicator, Config]:
    """Return the world of all ranks, with the backend that the job file names, and the file's configuration.

    `read` reads the job file. If the file has a mistake, the ranks join nevertheless, and all of them raise
    the mistake together.
    """
    found = _found(read)
    world = joining.world(backend="auto" if isinstance(found, UserError) else found.parallel.backend)
    with raise_on_all_ranks(world, "reading the job file"):
        if isinstance(found, UserError):
            raise found
    return world, found


def _found(read: Callable[[], Config]) -> Config | UserError:
    try:
        return read()
    except UserError as mistake:
        return mistake


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next step.

    By default glibc returns the activations of every step to the kernel, and page faults bring the memory
    back. This does nothing if the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, ctypes.c_int(2**31 - 1))


def use_threads(threads: int | None) -> None:
    """Set torch's number of threads to `threads`; if None, to OMP_NUM_THREADS, or 1 if that is not set."""
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or 1)


def compute_alike(deterministic: bool) -> None:
    """If `deterministic`, allow only operations that give the same bits every time; others raise.

    Call this before anything is computed on a device, because cuBLAS fixes its workspace at its first use.
    """
    if deterministic:
        os.environ.setdefault(*CUBLAS_WORKSPACES)
        torch.use_deterministic_algorithms(True)
        streams.choose_no_kernels_by_time()


def log_to_stdout(rank: int) -> None:
    """Print the log lines of rank 0, and of other ranks only errors."""
    package = logging.getLogger("hpcsgd")
    package.setLevel(logging.DEBUG if rank == 0 else logging.ERROR)
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
