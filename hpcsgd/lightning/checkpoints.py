"""What Lightning's checkpoint lacks: each rank's own part of its group's model, optimizers and method.

    epoch=3.ckpt                            Lightning's file: the averaged model, loops, schedulers, callbacks
    epoch=3.ckpt.ranks/step-00000340/…      a checkpoint of hpcsgd, of which each rank writes its own file

The file is written after the folder and names its step. The folder keeps the step before, too. So the file
and its step are both complete, however a job ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcsgd.checkpoint.folder import Checkpoints
from hpcsgd.checkpoint.snapshot import FURTHER, capture, restore
from hpcsgd.core.generators import generators_state
from hpcsgd.core.topology import Topology
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError

KEY = "hpcsgd"
"""The key of a checkpoint of Lightning under which `write` records the folder's step."""
_PATH = "path"
log = logging.getLogger(__name__)


def write(path: Any, topology: Topology, optimizers: Sequence[DistributedOptimizer]) -> dict[str, Any]:
    """Write each rank's part next to the file `path`; return what the file has to record. Collective."""
    device = optimizers[0].buckets[0].w.device
    name: str = topology.world.gather_objects(uuid.uuid4().hex)[0]
    first, *others = [
        capture(
            optimizer,
            shared={"name": name},
            own={"generators": generators_state(device) if number == 0 else None},
        )
        for number, optimizer in enumerate(optimizers)
    ]
    folder = _folder(path)
    step = optimizers[0].t
    with topology.raise_on_all_ranks("writing a checkpoint"):
        _require_local(str(path))
    Checkpoints(folder, topology).write(step, {**first, FURTHER: dict(enumerate(others, start=1))})
    return {"step": step, "name": name}


def locate(checkpoint: dict[str, Any], path: Any) -> dict[str, Any]:
    """Return the `checkpoint` that was read from `path`; add the path, for `read`, if ranks wrote parts."""
    if KEY not in checkpoint:
        return checkpoint
    return {**checkpoint, KEY: {**checkpoint[KEY], _PATH: str(path)}}


def read(
    recorded: Mapping[str, Any], topology: Topology, optimizers: Sequence[DistributedOptimizer]
) -> Any | None:
    """Restore each rank's part; return the saved state of its random generators. Collective.

    `recorded` is what `write` returned, with the path from `locate`. If P or K has changed, models and
    optimizer states are divided among the ranks anew, and the result is None.

    Raises:
        JobError: If the folder is missing or damaged, or belongs to another of Lightning's files.
    """
    checkpoints = Checkpoints(_folder(recorded[_PATH]), topology)
    checkpoints.recover()
    saved = checkpoints.of_step(recorded["step"])
    generators = None
    for number, optimizer in enumerate(optimizers):
        shared, own = restore(replace(saved, optimizer=number), optimizer)
        with topology.raise_on_all_ranks("reading a checkpoint"):
            if shared["name"] != recorded["name"]:
                raise UserError(f"{saved.path} is not of {recorded[_PATH]}: another training has written it")
        if own is not None and number == 0:
            generators = own["generators"]
    return generators


def remove(path: Any) -> None:
    """Remove the parts of all ranks; only rank 0 calls this."""
    shutil.rmtree(_folder(path), ignore_errors=True)


def _folder(path: Any) -> Path:
    return Path(f"{os.path.realpath(path)}.ranks")


def _require_local(path: str) -> None:
    if "://" in path:
        raise UserError(
            f"{path}: each rank writes its part of a checkpoint, on a file system that all ranks see: give "
            "ModelCheckpoint a dirpath there"
        )
