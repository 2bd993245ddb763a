"""Where positions own chunks and averagers may want whole models: who makes which of the other, and when."""

from __future__ import annotations

from hpcsgd.core.step import Averager, Step
from hpcsgd.transport import phase


def gather_chunks(s: Step) -> None:
    """w ← the chunks that the positions of the group own; collective over the group."""
    if s.job.K > 1:
        works = [s.job.group.allgather(b.w, b.own) for b in s.buckets]
        for work in works:
            work.wait()


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
