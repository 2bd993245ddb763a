"""Where positions own chunks and averagers may want whole models: who makes which of the other, and when."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hpcsgd.comm import Work, phase
from hpcsgd.core.averager import Averager, vectors_of
from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import Method
from hpcsgd.core.step import Publishing, StepContext
from hpcsgd.core.topology import Topology
from hpcsgd.engine.arriving import Arrivals
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import UserError

log = logging.getLogger(__name__)


class Gathering:
    """At the end of a step w is made of the chunks that the positions of the group own, `shards`, or is whole
    already. A bucket is gathered while others are worked on, in the same order on all ranks; all at the end
    where somebody is `publishing`, who has them back before the update. Begins before that.

    `arrivals`: where w may come later, all is gathered at the end, what is used first before the rest.
    """

    def __init__(
        self,
        s: StepContext,
        shards: bool,
        publishing: Publishing | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.shards = shards
        self._arrivals = arrivals if arrivals is not None and arrivals.wanted else None
        self._s = s
        self._publishing = publishing
        self._begun: dict[Bucket, Work] = {}
        if publishing is not None:
            publishing.take_back(s)

    def chunks_are_final(self, buckets: Iterable[Bucket]) -> None:
        """Of these, for this step: w is made of them."""
        if self._arrivals is None:
            self._begin(buckets)

    def finish(self) -> None:
        """Return once all of w is whole, or is to arrive; collective over the group."""
        order = self._s.buckets if self._arrivals is None else reversed(self._s.buckets)
        self._begin(b for b in order if b not in self._begun)
        if self._arrivals is not None:
            self._arrivals.begin(self._begun)
            self._begun = {}
        with phase("parameters"):
            for work in self._begun.values():
                work.wait()
            if self._publishing is not None:
                self._publishing.publish(self._s)

    def _begin(self, buckets: Iterable[Bucket]) -> None:
        if self.shards and self._publishing is None:
            with phase("parameters"):
                for b in (b for b in buckets if b.divided):
                    self._begun[b] = self._s.topology.intra_group.allgather(b.w, b.param_shard)


def gather_chunks(s: StepContext) -> None:
    """w ← the chunks that the positions of the group own; collective over the group."""
    works = [s.topology.intra_group.allgather(b.w, b.param_shard) for b in s.buckets if b.divided]
    for work in works:
        work.wait()


def publishing(topology: Topology, method: Method, plan: StepPlan) -> Publishing | None:
    """Who makes one model of the positions' chunks after a step, where that is no plain allgather.

    Raises `UserError` where groups meet with whole models.
    """
    if plan.publishing is None:
        asked = any(isinstance(part, Publishing) and part.publishes for _, part in method.by_role())
        if asked and topology.world_size > 1 and topology.rank == 0:
            log.warning(
                "Quantized(parameters=…): the optimizer looks at whole tensors, so parameters travel as they "
                "are"
            )
        return None
    if method.averager.traits.whole_model:
        raise UserError(
            "Quantized(parameters=…): groups of this method meet with whole models; leave `parameters` out"
        )
    return plan.publishing


def meet(s: StepContext, how: Averager, gathering: Gathering, updated: Iterable[Bucket]) -> None:
    """Let `how` average what groups have of all buckets, each once it is `updated`. An averager of whole
    models finds them whole, and one of chunks leaves them `gathering`, of each bucket while others are on
    their way. Collective."""
    whole = how.traits.whole_model
    if gathering.shards and whole:
        updated = list(updated)
        with phase("parameters"):
            gather_chunks(s)
    gathering.shards |= not whole
    with phase("average"):
        for b, _ in zip(s.buckets, how.average(vectors_of(how, updated), s), strict=True):
            if not whole:
                gathering.chunks_are_final([b])
