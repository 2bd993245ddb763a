"""The state of a method's parts in a checkpoint, and how it comes to another P × K; see `step.State`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hpcsgd.checkpoint.pieces import SavedGroups, mean
from hpcsgd.flat import Bucket
from hpcsgd.optimizer import DistributedOptimizer
from hpcsgd.step import State

log = logging.getLogger(__name__)

Chunks = dict[str, dict[str, list[Tensor]]]
"""By role and name, a vector for every bucket."""


def split_off_chunks(states: Mapping[str, State]) -> tuple[dict[str, State], Chunks]:
    """What is saved as it is, and what is saved piece by piece with the parameters."""
    chunks = {role: state["chunks"] for role, state in states.items() if "chunks" in state}
    rest = {role: {k: v for k, v in state.items() if k != "chunks"} for role, state in states.items()}
    return rest, chunks


def restored(
    mine: Mapping[str, State],
    everyone: Callable[[], Sequence[Mapping[str, State]]] | None,
    source: SavedGroups,
    optimizer: DistributedOptimizer,
) -> dict[str, State]:
    """What each part is to go on from. `mine`: as this rank saved it, or any of them where P × K is another;
    then `everyone` reads those of all ranks that count, and what cannot come along is dropped, saying so."""
    states = dict(mine) if everyone is None else _elsewhere(mine, everyone(), optimizer)
    dropped = [] if everyone is None else _dropped(mine, states)
    for role, chunks in source.chunk_names().items():
        if optimizer.job.P == 1:
            dropped += [f"{name} of {role}" for name in chunks]
        else:
            made = {name: _cut(source, role, name, optimizer) for name in chunks}
            states[role] = {**states[role], "chunks": made}
    if dropped and optimizer.job.rank == 0:
        job = optimizer.job
        log.warning("on %d × %d ranks these start anew: %s", job.P, job.K, ", ".join(dropped))
    return states


def _elsewhere(
    first: Mapping[str, State], everyone: Sequence[Mapping[str, State]], optimizer: DistributedOptimizer
) -> dict[str, State]:
    states: dict[str, State] = {}
    for role, state in first.items():
        theirs = [each[role] for each in everyone]
        kept = {name: section for name, section in state.items() if name == "same"}
        if "mean" in state:
            kept["mean"] = {k: sum(one["mean"][k] for one in theirs) / len(theirs) for k in state["mean"]}
        if "workers" in state and optimizer.exchanges:
            kept["workers"] = _mean_of_workers([one["workers"] for one in theirs])
        states[role] = kept
    return states


def _mean_of_workers(theirs: Sequence[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {layer: mean(each[name][layer] for each in theirs) for layer in layers}
        for name, layers in theirs[0].items()
    }


def _dropped(before: Mapping[str, State], after: Mapping[str, State]) -> list[str]:
    """What is in one and not in the other, to be read."""
    return [
        f"{', '.join(section)} of {role}"
        for role, state in before.items()
        for name, section in state.items()
        if section and name not in after[role]
    ]


def _cut(source: SavedGroups, role: str, name: str, optimizer: DistributedOptimizer) -> list[Tensor]:
    """For every bucket of this job its own chunk, or all of it where the averager does not shard."""
    whole = not optimizer.method.how.shards
    return [_cut_bucket(source, role, name, bucket, whole) for bucket in optimizer.buckets]


def _cut_bucket(source: SavedGroups, role: str, name: str, bucket: Bucket, whole: bool) -> Tensor:
    if whole:
        wanted = [(slot.name, 0, slot.stop - slot.start, slot.start) for slot in bucket.slots]
    else:
        wanted = [(piece.slot.name, piece.start, piece.stop, piece.offset) for piece in bucket.pieces]
    parts = [(source.chunk(role, name, param, start, stop), at) for param, start, stop, at in wanted]
    dtype = parts[0][0].dtype if parts else bucket.w.dtype
    made = torch.zeros((bucket.w if whole else bucket.own).numel(), dtype=dtype, device=bucket.w.device)
    for values, offset in parts:
        made[offset : offset + values.numel()] = values
    return made
