"""The division of the update among the ranks of a group: by elements, by tensors, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import nn, optim

from hpcsgd.core.flat import Bucket, flatten
from hpcsgd.core.fsdp import flatten_shards, is_fsdp
from hpcsgd.core.layout import bucket_bytes, nbytes
from hpcsgd.core.method import Method
from hpcsgd.core.topology import Topology
from hpcsgd.engine.in_parts import is_by_rows, is_elementwise, is_tensorwise, seen_whole
from hpcsgd.engine.iterates import with_modes
from hpcsgd.engine.plan import StepPlan, Update

log = logging.getLogger(__name__)
MUCH = 0.25
"""The share of padding in buckets above which a warning is logged."""


def laid_out(
    topology: Topology,
    method: Method,
    optimizer: optim.Optimizer,
    model: nn.Module,
    trained: Sequence[tuple[str, nn.Parameter]],
    *,
    elementwise: bool | None,
    tensorwise: bool | None,
    bucket_cap_mb: float | None,
) -> tuple[StepPlan, list[Bucket]]:
    """Return the plan of a step of `method` for this optimizer, and the `trained` parameters as buckets.

    `elementwise`, `tensorwise`, `bucket_cap_mb`: as the user set them. If the first two are None, the
    optimizer's class decides; if the last is None, buckets have the default size.
    """
    in_bucket = bucket_bytes(nbytes(p for _, p in trained), bucket_cap_mb)
    by_torch = is_fsdp(trained[0][1])
    plan = StepPlan.of(method, update_of(optimizer, elementwise, tensorwise), by_torch=by_torch)
    if by_torch:
        return plan, flatten_shards(trained, model, topology.group_size, topology.shard_index, in_bucket)
    whole = uncut(plan, optimizer, topology.group_size, elementwise)
    with torch.no_grad():
        buckets = flatten(trained, topology.group_size, topology.shard_index, in_bucket, whole)
    _tell_padding(topology, buckets)
    return plan, buckets


def update_of(
    optimizer: optim.Optimizer, elementwise: bool | None = None, tensorwise: bool | None = None
) -> Update:
    """Return how `optimizer` updates a model: as the user's arguments say, or where None, as its class."""
    elements, tensors = is_elementwise(optimizer), is_tensorwise(optimizer)
    by_rows = tensors and is_by_rows(optimizer)
    of_class = elements or tensors, type(optimizer).__name__, bool(with_modes(optimizer)), by_rows
    if elements if elementwise is None else elementwise:
        return Update("elements", *of_class)
    return Update("tensors" if (tensors if tensorwise is None else tensorwise) else "model", *of_class)


def uncut(
    plan: StepPlan, optimizer: optim.Optimizer, K: int, elementwise: bool | None = None
) -> Collection[nn.Parameter]:
    """Return the parameters that no shard may cut; none if the plan does not divide tensors, or K is 1."""
    if not plan.divides_tensors or K == 1:
        return ()
    every = {param for group in optimizer.param_groups for param in group["params"]}
    return seen_whole(optimizer) if elementwise is None else every


def _tell_padding(topology: Topology, buckets: Sequence[Bucket]) -> None:
    """Warn if uncut tensors leave much of the buckets empty; with another K there may be less padding."""
    used = sum(slot.stop - slot.start for b in buckets for slot in b.slots)
    padding = 1 - used / sum(b.size for b in buckets)
    if padding > MUCH and any(b.whole for b in buckets) and topology.rank == 0:
        log.warning(
            "%.0f %% of the flat vectors is padding: there are too few tensors, or too unlike ones, for "
            "groups of %d",
            100 * padding, topology.group_size,
        )  # fmt: skip
