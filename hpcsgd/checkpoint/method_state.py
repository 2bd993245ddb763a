"""The state of a method's parts in a checkpoint, and its conversion to another P × K; see `State`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from hpcsgd.checkpoint import tree
from hpcsgd.checkpoint.ranges import SavedGroups, mean
from hpcsgd.core.flat import Bucket
from hpcsgd.core.state import State
from hpcsgd.engine.optimizer import DistributedOptimizer

log = logging.getLogger(__name__)

Shards = dict[str, dict[str, list[Tensor]]]
"""A method's sharded vectors by role of the method's part and by name; each is a list of one per bucket."""


def split_off_shards(states: Mapping[str, State]) -> tuple[tree.Tree, Shards]:
    """Return the states without shards, and the shards. Only shards are saved by ranges of parameters."""
    shards = {role: state.sharded for role, state in states.items() if state.sharded}
    rest = {role: replace(state, sharded={}).to_dict() for role, state in states.items()}
    return rest, shards


def restored(
    mine: Mapping[str, State], source: SavedGroups, optimizer: DistributedOptimizer, *, goes_on: bool
) -> dict[str, State]:
    """Return the state with which each part of the method continues, by role.

    If `goes_on`, this rank continues with `mine`, the state that it saved itself. Otherwise the state comes
    from the saved groups `source`. State that cannot be converted to this P × K is dropped, with a warning.
    """
    states = dict(mine) if goes_on else _elsewhere(source, optimizer)
    dropped = _dropped(mine, states)
    for role, shards in source.shard_names().items():
        if optimizer.topology.has_one_group and "grad_reduce" not in role.split("."):
            dropped += [f"{name} of {role}" for name in shards]
        else:
            made = {name: _cut(source, role, name, optimizer) for name in shards}
            states[role] = replace(states[role], sharded=made)
    if dropped and optimizer.topology.rank == 0:
        topology = optimizer.topology
        log.warning(
            "on %d × %d ranks these start anew: %s",
            topology.num_groups,
            topology.group_size,
            ", ".join(dropped),
        )
    return states


def _elsewhere(source: SavedGroups, optimizer: DistributedOptimizer) -> dict[str, State]:
    states: dict[str, State] = {}
    for role, saved in source.states():
        numbers = [tree.read_item(each.mean) for each in saved]
        states[role] = State(
            replicated=tree.read_item(saved[0].replicated),
            mean={name: fmean(each[name] for each in numbers) for name in numbers[0]},
            per_rank_params=_mean_of_ranks([x.per_rank_params for x in saved])
            if optimizer.reduces_grads
            else {},
        )
    return states


def _mean_of_ranks(saved: Sequence[tree.Item]) -> dict[str, dict[str, Tensor]]:
    """Return the mean of the ranks' `per_rank_params`, read parameter by parameter.

    To read all parameters at once would need memory for one model per rank.
    """
    named = [{name: tree.items(layers) for name, layers in tree.items(each).items()} for each in saved]
    return {
        name: {layer: mean(tree.read_item(each[name][layer]) for each in named) for layer in layers}
        for name, layers in named[0].items()
    }


def _dropped(before: Mapping[str, State], after: Mapping[str, State]) -> list[str]:
    """Return, as text, the sections of state that `before` has and `after` lacks."""
    return [
        f"{', '.join(section)} of {role}"
        for role, state in before.items()
        for name, section in state.to_dict().items()
        if name not in after[role].to_dict()
    ]


def _cut(source: SavedGroups, role: str, name: str, optimizer: DistributedOptimizer) -> list[Tensor]:
    """Return, per bucket, this rank's shard of vector `name`, or all of it if the averager needs it whole."""
    whole = optimizer.method.averager.traits.whole_model
    return [_cut_bucket(source, role, name, bucket, whole) for bucket in optimizer.buckets]


def _cut_bucket(source: SavedGroups, role: str, name: str, bucket: Bucket, whole: bool) -> Tensor:
    if whole and bucket.cut_by_elements:
        wanted = [(slot.name, 0, slot.param.numel(), slot.start) for slot in bucket.slots]
    else:
        wanted = [(piece.slot.name, piece.start, piece.stop, piece.offset) for piece in bucket.ranges]
    parts = [(source.shard(role, name, param, start, stop), at) for param, start, stop, at in wanted]
    dtype = parts[0][0].dtype if parts else bucket.w.dtype
    made = torch.zeros(
        (bucket.w if whole else bucket.param_shard).numel(), dtype=dtype, device=bucket.w.device
    )
    for values, offset in parts:
        made[offset : offset + values.numel()] = values.view(-1)
    return made
