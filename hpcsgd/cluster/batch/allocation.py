"""The request of a job to a scheduler: nodes, ranks on each node, and a time limit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcsgd.errors import UserError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A request for nodes, ranks, GPUs and time. Raises `UserError` for values that no job can have."""

    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int = 1
    gpus_per_node: int | None = None
    gpus_per_rank: int | None = None
    time: str = "1:00:00"

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node", "gpus_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
        if self.gpus_per_node is not None and self.gpus_per_rank is not None:
            raise UserError(
                f"--gpus-per-node {self.gpus_per_node} and --gpus-per-rank {self.gpus_per_rank}: "
                "give one of them, not both"
            )
        if seconds(self.time) == 0:
            raise UserError(f"--time {self.time}: no time at all")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def gpus_on_node(self) -> int | None:
        """GPUs per node, from `gpus_per_node` or `gpus_per_rank`; None if neither is given."""
        each = self.gpus_per_rank
        return self.gpus_per_node if each is None else each * self.ranks_per_node

    @property
    def node_hours(self) -> float:
        """The node hours of one start of the job, if it uses all of its time."""
        return self.nodes * seconds(self.time) / 3600

    def options(self) -> dict[str, str]:
        """Return the allocation as options of sbatch, by name without dashes."""
        options = {
            "nodes": str(self.nodes),
            "ntasks-per-node": str(self.ranks_per_node),
            "cpus-per-task": str(self.cpus_per_rank),
            "time": self.time,
        }
        gpus = {"gpus-per-node": self.gpus_per_node, "gpus-per-task": self.gpus_per_rank}
        return options | {name: str(count) for name, count in gpus.items() if count is not None}


def seconds(time: str) -> int:
    """Return the seconds of a `time` in sbatch's notation.

    Examples are ``90`` (minutes), ``90:00``, ``1:30:00`` and ``2-0`` (days and hours).
    """
    found = _TIME.fullmatch(time)
    if found is None or (found["days"] and found["second"] is None and found["third"]):
        raise UserError(f"--time {time}: expected minutes, H:MM:SS, or D-HH:MM:SS")
    numbers = [int(part) for part in (found["first"], found["second"], found["third"]) if part is not None]
    if found["days"] is not None or len(numbers) == 3:  # hours come first
        hours, minutes, rest = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, rest) = 0, [*numbers, 0][:2]
    return ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + rest
