"""Frozen parameters in a checkpoint: one copy, or one of each rank for those that the script changes itself.

An example of the latter is the teacher of a mean teacher, DINO or BYOL inside the model: each group has the
average of its own weights. Like buffers, such parameters come back on the same P × K as each rank had them,
and as their mean on another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpcsgd.checkpoint import tree
from hpcsgd.checkpoint.ranges import mean
from hpcsgd.checkpoint.tree import Tree
from hpcsgd.core.fsdp import is_fsdp, local, reshard
from hpcsgd.engine.alike import checksum
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError

SAME, UNLIKE = "frozen", "frozen_of_ranks"
"""The keys in a rank's file for parameters that are the same on all ranks, and for the others."""


def frozen(optimizer: DistributedOptimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each parameter of the model that is not trained."""
    reshard(optimizer.model)  # a forward pass may have left whole weights of an FSDP model
    trained = {param for _, param in optimizer.trained}
    return ((n, p) for n, p in optimizer.model.named_parameters() if p not in trained)


def captured(optimizer: DistributedOptimizer) -> Tree:
    """Return the frozen parameters that this rank saves, by `SAME` and `UNLIKE`; collective.

    Raises `UserError` on every rank if a parameter that torch has sharded differs between groups.
    """
    params, topology = dict(frozen(optimizer)), optimizer.topology
    unlike = _unlike(optimizer, params)
    for name in unlike:
        if is_fsdp(params[name]):
            raise UserError(
                f"frozen parameter {name}, which torch has sharded, differs between groups, because the "
                "script changes it, and a checkpoint has only one: register it as a buffer"
            )
    # Group 0 saves for all, and of a parameter that torch has sharded each of its ranks the own rows.
    saves = {n for n, p in params.items() if topology.rank == 0 or (topology.group_index == 0 and is_fsdp(p))}
    return {
        SAME: {name: local(p) for name, p in params.items() if name in saves and name not in unlike},
        UNLIKE: {name: params[name] for name in unlike},
    }


def saved(group_0: Sequence[tree.Item], ranks: Sequence[tree.Item]) -> Iterator[tuple[str, Tensor]]:
    """Yield each frozen parameter's name and values in a checkpoint.

    `group_0` are the files of group 0, whose rows are joined. Parameters that differed are the mean of those
    in the files of `ranks`.
    """
    parts = [tree.items(tree.items(file)[SAME]) for file in group_0]
    for name in parts[0]:
        rows = [tree.read_item(theirs[name]) for theirs in parts if name in theirs]
        yield name, torch.cat(rows) if len(rows) > 1 else rows[0]
    own = [tree.items(tree.items(file)[UNLIKE]) for file in ranks]
    for name in own[0]:
        yield name, mean(tree.read_item(theirs[name]) for theirs in own)


def _unlike(optimizer: DistributedOptimizer, params: dict[str, Tensor]) -> list[str]:
    """Return the names of `params` whose values, or whose rows, differ between ranks; collective."""
    topology = optimizer.topology
    if topology.world_size == 1 or not params:
        return []
    sums = topology.world.gather_objects({name: checksum(local(p)) for name, p in params.items()})
    K = topology.group_size
    return [
        name
        for name, p in params.items()
        if any(theirs[name] != sums[r % K if is_fsdp(p) else 0][name] for r, theirs in enumerate(sums))
    ]
