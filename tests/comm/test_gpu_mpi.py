"""Tests of device addresses given to MPI: what the library has to report, and what has to happen before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpcsgd.comm import Backend, Communicator, gpu_mpi, threads
from hpcsgd.comm.gpu_mpi import GpuAware, TakesAddresses, judged

GTL = "/opt/cray/pe/mpich/8.1.28/gtl/lib/libmpi_gtl_cuda.so"
MODULES = {
    "PE_MPICH_GTL_DIR_amd_gfx90a": "-L/opt/amd/lib",
    "PE_MPICH_GTL_LIBS_amd_gfx90a": "-lmpi_gtl_hsa",
    "PE_MPICH_GTL_DIR_nvidia80": "-L/opt/cray/pe/mpich/8.1.28/gtl/lib",
    "PE_MPICH_GTL_LIBS_nvidia80": "-lmpi_gtl_cuda",
}
CRAY = {"library": "MPI VERSION    : CRAY MPICH version 8.1.28.15", "environ": MODULES, "loaded": [GTL]}
ON = {"MPICH_GPU_SUPPORT_ENABLED": "1"}

SAID: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "neither by mpi_memory_alloc_kinds nor by MPIX_Query_cuda_support"),
    "no": ({"says": {"MPIX_Query_cuda_support": False}}, "without it (MPIX_Query_cuda_support says no)"),
    "yes": ({"says": {"MPIX_Query_cuda_support": True}}, ""),
    "by its kinds of memory": ({"kinds": "mpi,system,cuda:device"}, ""),
    "kinds of another maker": ({"kinds": "mpi,system,rocm:device"}, "does not say"),
    "yes, of HIP": ({"runtime": "hip", "says": {"MPIX_Query_hip_support": True}}, ""),
    "yes, of ROCm": ({"runtime": "hip", "says": {"MPIX_Query_rocm_support": True}}, ""),
    "yes, but of CUDA": ({"runtime": "hip", "says": {"MPIX_Query_cuda_support": True}}, "nor by MPIX_Query_"),
    "a device that it cannot know": ({"runtime": "far"}, "do not know devices of kind far"),
    "Cray, all there": ({**CRAY, "environ": MODULES | ON}, ""),
    "Cray, not asked for": (CRAY, "MPICH_GPU_SUPPORT_ENABLED=1 alone"),
    "Cray, GTL not loaded": ({**CRAY, "environ": MODULES | ON, "loaded": []}, f"lacks its {GTL}: name it in"),
    "Cray, no modules": ({**CRAY, "environ": ON, "loaded": []}, "lacks its libmpi_gtl_cuda.so"),
    "Cray, GTL of another maker": (
        {**CRAY, "runtime": "hip", "environ": MODULES | ON}, "lacks its /opt/amd/lib/libmpi_gtl_hsa.so"
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", SAID)
def test_what_the_library_says_decides(said: str) -> None:
    given, why = SAID[said]
    given = {"runtime": "cuda", "library": "MPICH 5", "kinds": "", "environ": {}, "loaded": [], **given}
    answers = given.pop("says", {})
    found = judged(**given, query=answers.get)
    assert why in found
    assert bool(found) == bool(why)


OPERATIONS: dict[str, Callable[[Backend, torch.Tensor, torch.Tensor], object]] = {
    "alltoall": lambda b, out, x: b.alltoall(out, x),
    "reduce_scatter": lambda b, out, x: b.reduce_scatter(out, x, "sum"),
    "allgather": lambda b, out, x: b.allgather(out, x),
    "allgatherv": lambda b, out, x: b.allgatherv(out, x, [4]),
    "allreduce": lambda b, out, x: b.allreduce(x, "sum"),
    "bcast": lambda b, out, x: b.bcast(x, 0),
    "sendrecv": lambda b, out, x: b.sendrecv({0: x}, {0: out}),
    "send and receive": lambda b, out, x: (b.send(x, 0), b.recv(out, 0)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_the_stream_was_given_is_done_before_mpi_sees_an_address(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is synchronized before every single call of the library."""
    order: list[str] = []
    monkeypatch.setattr(gpu_mpi, "settle", lambda device: order.append("settle"))

    class Noting:
        """A wrapper of the host's backend that records the calls which the tested operation makes."""

        def __init__(self, inner: Backend) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.inner, name)
            if not callable(found):
                return found

            def noted(*arguments: Any) -> Any:
                order.append("library")
                return found(*arguments)

            return noted

    def call(world: Communicator) -> None:
        backend = GpuAware(Noting(world.backend))  # pyright: ignore[reportArgumentType]
        OPERATIONS[operation](backend, torch.zeros(4), torch.ones(4))

    threads.run(1, call)
    assert order
    assert order[::2] == ["settle"] * (len(order) // 2)
    assert order[1::2] == ["library"] * (len(order) // 2)


@pytest.mark.processes
@pytest.mark.of_mpi
@pytest.mark.ranks(2)
def test_this_machines_library_is_asked(run) -> None:
    """The library reports no support for GPUs, because it was built on a machine without them."""

    def ask(world: Communicator) -> str:
        host = getattr(world.backend, "host")  # noqa: B009 - not every Backend has one
        assert isinstance(host, TakesAddresses)
        return host.lacks(torch.device("cuda", 0))

    for why in run(2, ask):
        assert "without it" in why or "does not say" in why
