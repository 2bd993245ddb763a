"""The gather of shards into whole models, before and after the groups average."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import Tensor

from hpcsgd.comm import Work, phase
from hpcsgd.core.averager import Averager, vectors_of
from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import Method
from hpcsgd.core.step import QuantizedGather, StepContext
from hpcsgd.core.topology import Topology
from hpcsgd.engine.iterates import average_iterates, iterates
from hpcsgd.engine.pending_params import PendingParams
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import UserError

log = logging.getLogger(__name__)


class ParamGather:
    """The gather at the end of a step that makes each bucket's `w` whole from the ranks' shards.

    `shards`: each rank has updated only its shards. If False, `w` is whole, and nothing is gathered.
    `publishing`: the gradient reduction, if it gathers quantized shards. It restores the exact shards when
    this object is made, before the update, and gathers all buckets once, at the end. `pending`: if it is
    enabled, buckets are gathered at the end, in the order of the next use. Without both, a bucket is gathered
    while others are updated or averaged, in the same order on all ranks.
    """

    def __init__(
        self,
        s: StepContext,
        shards: bool,
        publishing: QuantizedGather | None = None,
        pending: PendingParams | None = None,
    ) -> None:
        self.shards = shards
        self._pending = pending if pending is not None and pending.enabled else None
        self._s = s
        self._quantized_gather = publishing
        self._begun: dict[Bucket, Work] = {}
        if publishing is not None:
            publishing.restore(s)

    def shards_are_final(self, buckets: Iterable[Bucket]) -> None:
        """Begin to gather `buckets`, whose shards do not change any more in this step."""
        if self._pending is None:
            self._begin(buckets)

    def finish(self) -> None:
        """Make every bucket's `w` whole; with `pending`, only begin to. Collective over the group."""
        order = self._s.buckets if self._pending is None else reversed(self._s.buckets)
        self._begin(b for b in order if b not in self._begun)
        if self._pending is not None:
            self._pending.begin(self._begun)
            self._begun = {}
        with phase("param_gather"):
            for work in self._begun.values():
                work.wait()
            if self._quantized_gather is not None:
                self._quantized_gather.gather(self._s)

    def _begin(self, buckets: Iterable[Bucket]) -> None:
        if self.shards and self._quantized_gather is None:
            with phase("param_gather"):
                for b in (b for b in buckets if b.cut_by_elements):
                    self._begun[b] = self._s.topology.intra_group.allgather(b.w, b.param_shard)


def gather_shards(s: StepContext) -> None:
    """Gather w from the shards of the group's ranks; collective over the group."""
    works = [s.topology.intra_group.allgather(b.w, b.param_shard) for b in s.buckets if b.cut_by_elements]
    for work in works:
        work.wait()


def quantized_gather(topology: Topology, method: Method, plan: StepPlan) -> QuantizedGather | None:
    """Return the gradient reduction of `method` if it also gathers shards, quantized; else None.

    Raises `UserError` if the method averages whole models.
    """
    if plan.quantizes_gather is None:
        asked = any(
            isinstance(part, QuantizedGather) and part.quantizes_gather for _, part in method.by_role()
        )
        if asked and topology.world_size > 1 and topology.rank == 0:
            log.warning(
                "Quantized(parameters=…): the optimizer needs whole tensors, so parameters are not quantized"
            )
        return None
    if method.averager.traits.whole_model:
        raise UserError("Quantized(parameters=…): this method averages whole models; leave `parameters` out")
    return plan.quantizes_gather


def synchronize_models(
    s: StepContext,
    how: Averager,
    param_gather: ParamGather,
    updated: Iterable[Bucket],
    *,
    has_modes: bool,
) -> None:
    """Let the averager `how` average all buckets, each once it is `updated`. Collective.

    For an averager of whole models, all shards are gathered before. For an averager of shards, `param_gather`
    gathers each bucket while others are being averaged. Raw iterates of an optimizer that `has_modes` are
    averaged, too.
    """
    whole = how.traits.whole_model
    if param_gather.shards and whole:
        updated = list(updated)
        with phase("param_gather"):
            gather_shards(s)
    param_gather.shards |= not whole
    found: dict[str, list[Tensor]] = {}
    if has_modes:
        updated = list(updated)
        found = iterates(s)
    with phase("model_average"):
        for b, _ in zip(s.buckets, how.average(vectors_of(how, updated), s), strict=True):
            if not whole:
                param_gather.shards_are_final([b])
    average_iterates(found, s, how)
    for slot in (slot for b in s.buckets for slot in b.slots):
        if slot.param.requires_grad or not s.in_step:  # a step restores frozen parameters
            slot.count_write()
