"""How the positions of a group divide the update among them: by elements, by tensors, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import nn, optim

from hpcsgd.core.flat import Bucket, flatten
from hpcsgd.core.layout import bucket_bytes, nbytes
from hpcsgd.core.method import Method
from hpcsgd.core.shards import flatten_shards, is_sharded
from hpcsgd.core.step import Exchange
from hpcsgd.core.topology import Job
from hpcsgd.engine.in_parts import is_elementwise, is_tensorwise, seen_whole
from hpcsgd.errors import UserError
from hpcsgd.exchanges import Gathered
from hpcsgd.exchanges.by_torch import left_to_torch

log = logging.getLogger(__name__)
MUCH = 0.25
"""Of what lies in buckets."""


def laid_out(
    job: Job,
    method: Method,
    optimizer: optim.Optimizer,
    model: nn.Module,
    trained: Sequence[tuple[str, nn.Parameter]],
    *,
    elementwise: bool | None,
    tensorwise: bool | None,
    bucket_mb: float | None,
) -> tuple[Exchange, list[Bucket]]:
    """The method's exchange as it has to be for this optimizer, and the `trained` parameters as flat vectors.

    `elementwise`, `tensorwise`: what the user says about it; None: what is known. `bucket_mb`: likewise.
    """
    in_bucket = bucket_bytes(nbytes(p for _, p in trained), bucket_mb)
    if is_sharded(trained[0][1]):
        exchange = _in_rows(method, optimizer, elementwise)
        return exchange, flatten_shards(trained, model, job.K, job.j, in_bucket)
    exchange, whole = divided(job, method, optimizer, elementwise, tensorwise)
    with torch.no_grad():
        buckets = flatten(trained, job.K, job.j, in_bucket, whole)
    _tell_padding(job, buckets)
    return exchange, buckets


def divided(
    job: Job, method: Method, optimizer: optim.Optimizer, elementwise: bool | None, tensorwise: bool | None
) -> tuple[Exchange, Collection[nn.Parameter]]:
    """The exchange, and the parameters that no chunk may cut.

    Groups that are jobs of their own may be of several K, and meet with models that are laid out alike: there
    nobody owns tensors.
    """
    exchange = method.exchange
    if not exchange.shards or (is_elementwise(optimizer) if elementwise is None else elementwise):
        return exchange, ()
    if job.has_peers or not (is_tensorwise(optimizer) if tensorwise is None else tensorwise):
        return Gathered(exchange), ()
    if job.K == 1:
        return exchange, ()
    every = {param for group in optimizer.param_groups for param in group["params"]}
    return exchange, seen_whole(optimizer) if elementwise is None else every


def _in_rows(method: Method, optimizer: optim.Optimizer, elementwise: bool | None) -> Exchange:
    """Raises `UserError` for what cannot be where each position has no more than rows of a tensor."""
    if not (is_elementwise(optimizer) if elementwise is None else elementwise):
        raise UserError(
            f"parameters are sharded by torch, and {type(optimizer).__name__} is not known to update every "
            "element by itself: it would take rows for tensors (DistributedOptimizer(elementwise=True) if it "
            "does)"
        )
    return left_to_torch(method.exchange)


def _tell_padding(job: Job, buckets: Sequence[Bucket]) -> None:
    """Where tensors that nobody cuts leave much of the buckets empty: more positions, or fewer, might not."""
    used = sum(slot.stop - slot.start for b in buckets for slot in b.slots)
    padding = 1 - used / sum(b.size for b in buckets)
    if padding > MUCH and any(b.whole for b in buckets) and job.rank == 0:
        log.warning(
            "%.0f %% of the flat vectors is padding: tensors are too few or too unlike for %d positions",
            100 * padding, job.K,
        )  # fmt: skip
