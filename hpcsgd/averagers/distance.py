"""The distance metric of a meeting: D = (1/P) Σ_i ‖W_i − W̄‖₂ (eq. 9 of the hierarchical local SGD paper).

D counts how far the groups have walked apart; it is computed from what each group brought to the meeting
and what it left with, so it is exact for any averager that leaves all groups with W̄.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcsgd.step import Averager, Step
from hpcsgd.transport import phase


@dataclass(frozen=True)
class Measured:
    """`inner`, with D noted in `s.notes["distance"]`; 8 bytes over the group, 8 over the groups."""

    inner: Averager

    @property
    def shards(self) -> bool:
        return self.inner.shards

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def __call__(self, s: Step) -> None:
        mine = [b.own if self.shards else b.w for b in s.buckets]
        brought = [x.clone() for x in mine]
        self.inner(s)
        squared = torch.zeros((), dtype=torch.float64)
        for before, after in zip(brought, mine, strict=True):
            squared += torch.linalg.vector_norm(before.sub_(after), dtype=torch.float64).square().cpu()
        with phase("distance"):
            if self.shards:
                s.job.group.allreduce(squared).wait()
            D = squared.sqrt()
            s.job.cross.allreduce(D).wait()
        s.notes["distance"] = D.item() / s.job.P
