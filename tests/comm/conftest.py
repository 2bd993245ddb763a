"""Runs the tests in `BATTERY` with every way to send tensors on devices, here with host memory.

The ways are the backend that is there, a process group of gloo, which uses those lines of
`process_group.py` that NCCL uses on GPUs, and device addresses given to MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcsgd.comm import Backend, Communicator, gpu_mpi
from hpcsgd.comm.by_device import ByDevice
from hpcsgd.comm.gpu_mpi import GpuAware
from hpcsgd.comm.process_group import GroupBackend
from hpcsgd.comm.shutdown import close_libraries

BATTERY = {"test_operations.py", "test_messages.py"}
NOT_BY_GLOO = {
    "test_requests_are_answered_while_their_owner_is_busy": "no group receives from whoever sends first",
}
"""Tests that gloo cannot run.

It cannot run services (`test_service.py`) either, because ranks send requests to themselves there. The host's
backend always handles both.
"""

Make = Callable[[Backend, float], Backend]
WAYS: dict[str, Make] = {
    "gloo": lambda host, timeout: GroupBackend(host, "gloo", timeout),
    "addresses": lambda host, timeout: GpuAware(host),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames and metafunc.definition.path.name in BATTERY:
        ways = [way for way in WAYS if way != "gloo" or metafunc.function.__name__ not in NOT_BY_GLOO]
        metafunc.parametrize("run", ["host", *ways], indirect=True)


@pytest.fixture
def run(
    request: pytest.FixtureRequest, run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., list[Any]]]:
    """Override the fixture of `tests/conftest.py`: tensors are sent in the way that the parameter names."""
    make = WAYS.get(getattr(request, "param", "host"))
    if make is None:
        yield run
        return
    monkeypatch.setattr(gpu_mpi, "settle", lambda device: None)  # host memory has no streams
    monkeypatch.setattr(gpu_mpi, "on_accelerator", lambda device: device.type == "cpu")
    yield lambda n, function, *args: run(n, By(make, function), *args)
    close_libraries()  # a process group has threads of its own


class By:
    """Calls `function` with a world whose backend `make` builds from the host's backend."""

    def __init__(self, make: Make, function: Callable[..., Any]) -> None:
        self._make, self._function = make, function

    def __call__(self, world: Communicator, *args: Any) -> Any:
        host = world.backend
        assert isinstance(host, ByDevice)
        made = world.run(lambda: self._make(host.host, world.timeout), "meeting").wait()
        return self._function(world.with_backend(made, made.name), *args)
