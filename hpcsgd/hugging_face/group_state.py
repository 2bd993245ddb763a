"""The state that Hugging Face's checkpoints have no place for: that of every group and every rank.

Their checkpoint has one model, which is the average of all groups. A folder `hpcsgd` inside it has the model,
the optimizer state and the method's state of each group, as a checkpoint of `hpcsgd.save`. Frozen parameters
that are the same on all ranks are left out: they are in the model of the checkpoint, or in the base model of
an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcsgd.checkpoint.folder import Checkpoints
from hpcsgd.checkpoint.frozen import SAME
from hpcsgd.checkpoint.snapshot import FURTHER, capture, restore
from hpcsgd.checkpoint.tree import Tree
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError

FOLDER = "hpcsgd"


def write(checkpoint: Path, optimizers: Sequence[DistributedOptimizer], call: str) -> None:
    """Save the state of all `optimizers` in the folder of a checkpoint; collective.

    Raises:
        UserError: Inside `averaged_model()`, or among the backward passes of a step.
        JobError: If a rank cannot write.
    """
    for optimizer in optimizers:
        optimizer.ready_for(call)
    topology = optimizers[0].topology
    with topology.raise_on_all_ranks(call):
        for optimizer in optimizers:
            optimizer.require_between_steps(call)
    first, *others = [_captured(optimizer) for optimizer in optimizers]
    further = dict(enumerate(others, start=1))
    Checkpoints(checkpoint / FOLDER, topology).write(optimizers[0].t, {**first, FURTHER: further})


def restore_all(checkpoint: Path, optimizers: Sequence[DistributedOptimizer], call: str) -> None:
    """Restore what `write` has saved of the same `optimizers`, on the same P × K or another; collective.

    Raises:
        UserError: If the checkpoint was not saved by hpcsgd, is damaged, or is of another model, optimizer or
            method.
    """
    for optimizer in optimizers:
        optimizer.ready_for(call)
    topology = optimizers[0].topology
    checkpoints = Checkpoints(checkpoint / FOLDER, topology)
    checkpoints.recover()
    saved = checkpoints.newest()
    with topology.raise_on_all_ranks(call):
        if saved is None:
            raise UserError(
                f"{call}: {checkpoint} has no folder {FOLDER!r} with a checkpoint: it was not saved by "
                "hpcsgd, or not completely"
            )
    for number, optimizer in enumerate(optimizers):
        restore(replace(saved, optimizer=number), optimizer)


def _captured(optimizer: DistributedOptimizer) -> Tree:
    return {**capture(optimizer, shared={}, own={}), SAME: {}}
