"""Blocking calls of MPICH that sleep while they wait. By default they spin.

If ranks share cores, a rank that spins slows down the rank that it waits for. With Linux 6.18 it has been
seen to keep that rank from running at all, for up to two minutes. This kernel divides a core among sessions,
and Hydra's mpiexec starts each rank in its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Generator

from hpcsgd.comm.mpi_library import MPI
from hpcsgd.comm.timer_slack import default_slack

_VARIABLE = b"MPIR_CVAR_ENABLE_HEAVY_YIELD"
"""If it is 1, MPICH sleeps for 1 ns between the polls of a blocking call; timer slack makes that 50 µs."""
_lock = threading.Lock()
_asleep = set[int]()  # the threads that are inside `asleep`


@contextlib.contextmanager
def asleep() -> Generator[None]:
    """Within the block, this thread's blocking MPI calls sleep while they wait, if MPI is MPICH.

    Those of other threads do so, too, until the block ends. Then all are as fast as before.
    """
    thread = threading.get_ident()
    with _lock:
        _asleep.add(thread)
        _set(1)
    try:
        with default_slack():
            yield
    finally:
        with _lock:
            _asleep.remove(thread)
            _set(len(_asleep) > 0)


def _set(value: int) -> None:
    if (variable := _variable()) is not None:
        library, handle = variable
        library.MPI_T_cvar_write(handle, ctypes.byref(ctypes.c_int(value)))


@functools.cache
def _variable() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """Return the library and its handle of the control variable.

    Return None if the library has no such variable, or if its user has set the variable to 1.
    """
    library, index = ctypes.CDLL(MPI.__file__), ctypes.c_int()
    handle, count, value = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    library.MPI_T_init_thread(MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    if library.MPI_T_cvar_get_index(_VARIABLE, ctypes.byref(index)) != MPI.SUCCESS:
        return None
    library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count))
    library.MPI_T_cvar_read(handle, ctypes.byref(value))
    return None if value.value else (library, handle)
