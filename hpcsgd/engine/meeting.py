"""Where positions own chunks and averagers may want whole models: who makes which of the other, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hpcsgd.core.capabilities import BeforeBucket, nothing, one_by_one
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import Averager, Step
from hpcsgd.transport import Work, phase


class Gathering:
    """At the end of a step w is made of the chunks that the positions of the group own, `shards`, or is whole
    already. A bucket is gathered while others are worked on, in the same order on all ranks."""

    def __init__(self, s: Step, shards: bool) -> None:
        self.shards = shards
        self._s = s
        self._begun: dict[Bucket, Work] = {}

    def chunks_are_final(self, buckets: Iterable[Bucket]) -> None:
        """Of these, for this step: w is made of them."""
        if self.shards and self._s.job.K > 1:
            with phase("parameters"):
                for b in buckets:
                    self._begun[b] = self._s.job.group.allgather(b.w, b.own)

    def finish(self) -> None:
        """Return once all of w is whole; collective over the group."""
        self.chunks_are_final(b for b in self._s.buckets if b not in self._begun)
        with phase("parameters"):
            for work in self._begun.values():
                work.wait()


def gather_chunks(s: Step) -> None:
    """w ← the chunks that the positions of the group own; collective over the group."""
    if s.job.K > 1:
        works = [s.job.group.allgather(b.w, b.own) for b in s.buckets]
        for work in works:
            work.wait()


def once_in(updates: Iterator[Sequence[Bucket]]) -> BeforeBucket:
    """Goes on with `updates` until a bucket is through."""
    through: set[Bucket] = set()

    def wait(b: Bucket) -> None:
        while b not in through and (part := next(updates, None)) is not None:
            through.update(part)

    return wait


def meet(s: Step, how: Averager, gathering: Gathering, updated: BeforeBucket = nothing) -> None:
    """An averager of whole models finds them whole, and one of chunks leaves them `gathering`; it finds each
    bucket once that is `updated`. Collective."""
    if gathering.shards and not how.shards:
        for b in s.buckets:
            updated(b)
        with phase("parameters"):
            gather_chunks(s)
    gathering.shards |= how.shards
    with phase("average"):
        for b in one_by_one(how, s, updated):
            if how.shards:
                gathering.chunks_are_final([b])
