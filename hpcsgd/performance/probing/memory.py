"""Check that the models of P groups fit into memory before they are built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.errors import UserError, count_text

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def require_room(each: int, Ps: Sequence[int], free: int, world: Communicator) -> None:
    """Raise `UserError` if, for a number P in `Ps`, P models do not fit into memory. Collective.

    The error states how many models fit. `each`: bytes of a model. `Ps`: the numbers of groups, and thus of
    models. `free`: free bytes on this rank's node.
    """
    nodes = world.gather_objects(world.backend.node)
    room = free / nodes.count(world.backend.node)
    fitting = min(world.gather_objects(int(room // each))) * world.size
    too_many = [P for P in Ps if fitting < P]
    if too_many:
        raise UserError(
            f"{too_many[0]} models of {each / 2**20:.0f} MiB, with gradients and the optimizer's state, do "
            f"not fit into {world.size} times {room / 2**30:.1f} GiB: up to "
            f"{count_text(fitting, 'group')} do; or give "
            "more ranks, or keep idle models elsewhere (--offload-dir FOLDER; idle= in Python)"
        )


def model_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of `tensors`. Gradients do not count: only the model that trains now has them."""
    return sum(x.numel() * x.element_size() for x in tensors)


def free_host_bytes() -> int:
    """Return the bytes of host memory that the kernel and cgroups still allow this process to use."""
    return min([_available(), *_allowed()])


def _available() -> int:
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no MemAvailable in /proc/meminfo")


def _allowed() -> Iterator[int]:
    """Yield the free bytes of each cgroup (version 1 or 2) that limits this process, as under Slurm."""
    for line in (PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        for group in [folder, *folder.parents]:
            if group.is_relative_to(root):
                yield from _left(group, *names)


def _left(group: Path, limit: str, usage: str) -> Iterator[int]:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root cgroup has no such files, and in a container the path may not exist
        return
    if most != "max":
        yield max(int(most) - used + int(stat.get("inactive_file", 0)), 0)
