"""Will P models fit into memory? Asked before they are made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from hpcsgd.errors import UserError
from hpcsgd.transport import Transport
from hpcsgd.tuning.replicas import Trainee


def require_room(each: int, Ps: Sequence[int], world: Transport) -> None:
    """Raise `UserError` naming the P that fit, unless all do, with models of `each` bytes; collective."""
    nodes = world.gather_objects(world.backend.node)
    room = available_bytes() / nodes.count(world.backend.node)
    fitting = min(world.gather_objects(int(room // each))) * world.size
    too_many = [P for P in Ps if fitting < P]
    if too_many:
        raise UserError(
            f"{too_many[0]} models of {each / 2**20:.0f} MiB, with gradients and the optimizer's state, do "
            f"not fit into {world.size} times {room / 2**30:.1f} GiB: up to {fitting} groups do, "
            "or give more ranks"
        )


def model_bytes(trainee: Trainee) -> int:
    """Parameters, gradients, buffers, the optimizer's state, after a step."""
    parameters = list(trainee.model.parameters())
    held: list[Tensor] = [*parameters, *parameters, *trainee.model.buffers()]
    for state in trainee.optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(x.numel() * x.element_size() for x in held)


def available_bytes() -> int:
    """Of this node, as the kernel estimates them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no MemAvailable in /proc/meminfo")
