"""Where positions own chunks and averagers may want whole models: who makes which of the other, and when."""

from __future__ import annotations

import logging

from hpcsgd.core.method import Method
from hpcsgd.core.step import Averager, Exchange, Publishing, Step, publisher
from hpcsgd.core.topology import Job
from hpcsgd.errors import UserError
from hpcsgd.transport import phase

log = logging.getLogger(__name__)


def gather_chunks(s: Step) -> None:
    """w ← the chunks that the positions of the group own; collective over the group."""
    if s.job.K > 1:
        works = [s.job.group.allgather(b.w, b.own) for b in s.buckets]
        for work in works:
            work.wait()


def publishing(job: Job, method: Method, exchange: Exchange) -> Publishing | None:
    """Who makes one model of the positions' chunks after a step, where that is no plain allgather.

    `exchange`: as the engine has it. Raises `UserError` where groups meet with whole models.
    """
    if publisher(exchange) is None:
        asked = any(isinstance(part, Publishing) and part.publishes for _, part in method.by_role())
        if asked and job.size > 1 and job.rank == 0:
            log.warning("parameters travel as they are, if at all: the optimizer looks at whole tensors")
        return None
    if not method.how.shards:
        raise UserError("parameters in few bits: groups meet with whole models here; leave them as they are")
    return publisher(exchange)


def meet(s: Step, how: Averager, shards: bool) -> None:
    """An averager of whole models finds them whole, and one of chunks leaves the models whole; `shards`:
    whether positions own chunks in this step. Collective."""
    if shards and not how.shards:
        with phase("parameters"):
            gather_chunks(s)
    with phase("average"):
        how(s)
    if how.shards and not shards:
        with phase("parameters"):
            gather_chunks(s)
