"""The battery of this folder is run twice: by the transport that is there, and by a process group of gloo beside
it, which goes through the lines of `process_group.py` that NCCL goes through on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcsgd.transport import Transport
from hpcsgd.transport.by_device import ByDevice
from hpcsgd.transport.ending import close_libraries
from hpcsgd.transport.process_group import GroupBackend

NOT_BY_GLOO = {
    "test_service.py": "a rank asks itself, too, and answers whoever asks: services are the host's",
    "test_large.py": "gloo holds the whole of it several times",
    "test_requests_are_answered_while_their_owner_is_busy": "NCCL has no message from whoever sends first",
}


@pytest.fixture(params=["host", "gloo"])
def run(request: pytest.FixtureRequest, run: Callable[..., list[Any]]) -> Iterator[Callable[..., list[Any]]]:
    """As that of `tests/conftest.py`, by the one or the other."""
    if request.param == "host":
        yield run
        return
    for name in (request.path.name, request.function.__name__):
        if name in NOT_BY_GLOO:
            pytest.skip(NOT_BY_GLOO[name])
    yield lambda n, function, *args: run(n, ByGloo(function), *args)
    close_libraries()  # a group has threads of its own


class ByGloo:
    """`function` of a world whose tensors travel by a process group."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, world: Transport, *args: Any) -> Any:
        host = world.backend
        assert isinstance(host, ByDevice)
        group = world.run(lambda: GroupBackend(host.host, "gloo", world.timeout), "meeting").wait()
        return self._function(world.by(group, "gloo"), *args)
