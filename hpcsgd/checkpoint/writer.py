"""Checkpoints that are written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcsgd.checkpoint.folder import Checkpoints
from hpcsgd.comm import PeerLost, Work
from hpcsgd.comm.on_host import taken
from hpcsgd.core.topology import Topology


class Writer:
    """Writes one checkpoint at a time, on a lane of its own; holds a copy of what it writes. Every method is
    collective."""

    def __init__(self, folder: Path, topology: Topology) -> None:
        self._world = topology.world.dup_with_thread()
        self._checkpoints = Checkpoints(folder, replace(topology, world=self._world))
        self._under_way: Work | None = None

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """`state` of `step` may change once this returns. Waits for the checkpoint before this one."""
        self.finish()
        copy = taken(state)
        self._under_way = self._world.run(
            lambda: self._checkpoints.write(step, copy), f"checkpoint of step {step}"
        )

    def finish(self) -> None:
        """Return once what has begun is on the disk: however long this rank's own file takes, and no longer
        than the timeout for others. Raises `JobError` where a rank could not write."""
        under_way, self._under_way = self._under_way, None
        while under_way is not None:
            try:
                under_way.wait()
                return
            except PeerLost:
                if not self._checkpoints.writing:
                    raise
