"""A writer that saves checkpoints in its own thread while training continues."""

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
    """A writer of one checkpoint at a time, from a copy of the state. Its methods are collective."""

    def __init__(self, folder: Path, topology: Topology) -> None:
        self._world = topology.world.dup_with_thread()
        self._checkpoints = Checkpoints(folder, replace(topology, world=self._world))
        self._under_way: Work | None = None

    def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """Wait for the previous checkpoint, copy `state` and begin to write; then `state` may change."""
        self.finish()
        copy = taken(state)
        self._under_way = self._world.run(
            lambda: self._checkpoints.write(step, copy), f"checkpoint of step {step}"
        )

    def finish(self) -> None:
        """Return once the pending checkpoint is on the disk.

        This waits for this rank's own file as long as it takes, and for other ranks no longer than the
        timeout. Raises `JobError` if a rank could not write.
        """
        under_way, self._under_way = self._under_way, None
        while under_way is not None:
            try:
                under_way.wait()
                return
            except PeerLost:
                if not self._checkpoints.writing:
                    raise

    def remove(self, step: int) -> None:
        """Finish the pending checkpoint, and remove the one of `step`."""
        self.finish()
        self._checkpoints.remove(step)
