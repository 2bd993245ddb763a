"""Communication of device tensors by an MPI library that accesses device memory itself ("GPU-aware")."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcsgd.comm import sums
from hpcsgd.comm.backend import Backend, Ending, Reduction
from hpcsgd.comm.streams import on_accelerator, settle


class _Runtime(NamedTuple):
    """How MPI libraries show that they support one kind of device memory."""

    queries: tuple[str, ...]
    """Names of library functions that return 1 if this memory is supported, otherwise 0."""
    kinds: tuple[str, ...]
    """Names of this memory among the "memory allocation kinds" of MPI 4.1."""
    gtl: str
    """The library file of the "GPU transport layer" (GTL) of Cray's MPICH."""


_RUNTIMES = {
    "cuda": _Runtime(("MPIX_Query_cuda_support",), ("cuda",), "libmpi_gtl_cuda.so"),
    "hip": _Runtime(
        ("MPIX_Query_hip_support", "MPIX_Query_rocm_support"), ("rocm", "hip"), "libmpi_gtl_hsa.so"
    ),
    "xpu": _Runtime(("MPIX_Query_ze_support",), ("level_zero",), "libmpi_gtl_ze.so"),
}


@runtime_checkable
class TakesAddresses(Protocol):
    """A backend that passes addresses to its library, and knows whether device addresses are allowed."""

    def lacks(self, device: torch.device) -> str:
        """Return the reason why MPI cannot read the memory of `device`, or "" if it can."""
        ...


class GpuAware(Backend):
    """A backend for device tensors around `host`, whose library takes device addresses like host addresses.

    MPI knows no streams. So this backend waits until the work of the current stream is done before it
    passes an address to MPI. torch computes the sums, on the device.
    """

    def __init__(self, host: Backend) -> None:
        self.rank, self.size, self.node = host.rank, host.size, host.node
        self.name = f"GPU-aware {host.name}"
        self._host = host

    @property
    def host(self) -> Backend:
        return self._host

    def accepts(self, device: torch.device) -> bool:
        return on_accelerator(device)

    def alltoall(self, out: Tensor, x: Tensor) -> None:
        settle(x.device)
        self._host.alltoall(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        sums.reduce_scatter(self, out, x, reduction)

    def allgather(self, out: Tensor, x: Tensor) -> None:
        settle(x.device)
        self._host.allgather(out, x)

    def allgatherv(self, out: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        settle(x.device)
        self._host.allgatherv(out, x, counts)

    def allreduce(self, x: Tensor, reduction: Reduction) -> None:
        sums.allreduce(self, x, reduction)

    def bcast(self, x: Tensor, root: int) -> None:
        settle(x.device)
        self._host.bcast(x, root)

    def sendrecv(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        for device in {x.device for x in (*send.values(), *recv.values())}:
            settle(device)
        self._host.sendrecv(send, recv)

    def send(self, x: Tensor, to: int) -> None:
        settle(x.device)
        self._host.send(x, to)

    def recv(self, out: Tensor, source: int) -> int:
        settle(out.device)
        return self._host.recv(out, source)

    def gather_objects(self, item: Any) -> list[Any]:
        return self._host.gather_objects(item)

    def post_record(self, record: bytes, received: bytearray) -> Ending:
        return self._host.post_record(record, received)

    def split(self, color: int, key: int) -> Backend:
        return GpuAware(self._host.split(color, key))

    def abort(self, code: int) -> None:
        self._host.abort(code)


def judged(
    runtime: str,
    library: str,
    kinds: str,
    query: Callable[[str], bool | None],
    environ: Mapping[str, str],
    loaded: Collection[str],
) -> str:
    """Return why MPI cannot be given addresses of the runtime's device memory; "" if it can be tried.

    An address that the library does not support would end the process. So this checks the name of the
    library, its memory kinds by MPI 4.1, its query functions, the environment, and the loaded files.
    """
    if runtime not in _RUNTIMES:
        return f"MPI libraries do not know devices of kind {runtime}"
    asked = _RUNTIMES[runtime]
    if "CRAY MPICH" in library.upper():
        return _judged_cray(asked.gtl, environ, loaded)
    if any(word.split(":")[0] in asked.kinds for word in kinds.split(",")):
        return ""
    answers = {name: query(name) for name in asked.queries}
    if any(answers.values()):
        return ""
    denied = [name for name, answer in answers.items() if answer is not None]
    if denied:
        return f"the MPI library was built without it ({', '.join(denied)} says no)"
    return f"the MPI library does not say so, neither by mpi_memory_alloc_kinds nor by {asked.queries[0]}"


def loaded_files() -> set[str]:
    """Return the paths of the libraries that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/" in line}


def missing_gtl(gtl: str, environ: Mapping[str, str], loaded: Collection[str]) -> str:
    """Return the path of the file `gtl`, from Cray's variables, or else its name; empty if it is loaded."""
    if any(Path(path).name.startswith(gtl) for path in loaded):
        return ""
    word = gtl.removeprefix("lib").removesuffix(".so")
    for name, value in sorted(environ.items()):
        if name.startswith("PE_MPICH_GTL_LIBS_") and word in value:
            folder = environ.get(name.replace("_LIBS_", "_DIR_"), "").removeprefix("-L")
            return str(Path(folder) / gtl)
    return gtl


def _judged_cray(gtl: str, environ: Mapping[str, str], loaded: Collection[str]) -> str:
    if lacking := missing_gtl(gtl, environ, loaded):
        return f"Cray MPICH lacks its {lacking}: name it in LD_PRELOAD"
    if environ.get("MPICH_GPU_SUPPORT_ENABLED") != "1":
        return "Cray MPICH does so with MPICH_GPU_SUPPORT_ENABLED=1 alone"
    return ""


def answer(symbols: ctypes.CDLL, query: str) -> bool | None:
    """Return whether the function `query` of the library returns true; None if it has no such function."""
    try:
        return bool(getattr(symbols, query)())
    except AttributeError:
        return None


def runtime_of(device: torch.device) -> str:
    """Return the runtime of `device`, such as "cuda", but "hip" for ROCm, which torch calls "cuda", too."""
    return "hip" if device.type == "cuda" and torch.version.hip else device.type
