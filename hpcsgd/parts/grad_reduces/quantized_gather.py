"""How a position gives the others its chunk by a narrow wire, and loses nothing.

What all positions of a group have of a chunk is p, what its owner knows is x. In a step

    x ← p + e            before the update
    x ← the optimizer's update of x, and what a meeting makes of it
    q ← packed x − p     sent to all
    p ← p + unpacked q   on all, the owner, too: the same bits
    e ← x − p            what was left out, part of the next difference

The difference of one step is small, so that a few bits of it say more than as many bits of the chunk would,
and what they do not say is sent later: an update of any size arrives. Whoever moves p on all positions
between two steps (a checkpoint, a mean) moves x by as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.parts.quantizers.base import Quantizer, noise_for
from hpcsgd.parts.quantizers.mean import gathered

PARAMETERS = "parameters"
"""As the state of a method calls e."""


class QuantizedShards:
    """For every bucket a vector like the own chunk: e between two steps, p within one."""

    def __init__(self, wire: Quantizer) -> None:
        self.wire = wire
        self._beside: list[Tensor] = []
        self._saved: Sequence[Tensor] = []

    def restore(self, s: StepContext) -> None:
        """`param_shard` of every bucket: from p to x."""
        if s.topology.group_size == 1:  # nobody else has p: what was kept elsewhere comes home
            for b, e in zip(s.buckets, self._saved, strict=False):
                b.param_shard.add_(e)
            self._saved = []
            return
        if not self._beside:
            self._beside = [
                torch.zeros_like(b.param_shard, dtype=accumulation_dtype(b.param_shard.dtype))
                for b in s.buckets
            ]
            for e, saved in zip(self._beside, self._saved, strict=False):
                e.copy_(saved)
            self._saved = []
        for b, beside in zip(s.buckets, self._beside, strict=True):
            p = b.param_shard.to(beside.dtype, copy=True)
            b.param_shard.copy_(beside.add_(p))
            beside.copy_(p)

    def gather(self, s: StepContext) -> None:
        """`w` of every bucket: the p of all positions. Collective over the group."""
        if s.topology.group_size == 1:
            return
        for i, (b, p) in enumerate(zip(s.buckets, self._beside, strict=True)):
            x = b.param_shard.to(p.dtype, copy=True)
            b.param_shard.copy_(p)
            # By the position: groups with one model (`bsp`) keep it.
            moved = gathered(
                x - p, s.topology.intra_group, self.wire, noise_for(s.topology.shard_index, s.t, i, 2)
            )
            b.w.copy_(b.w.to(p.dtype).add_(moved))
            p.copy_(x.sub_(b.param_shard.to(p.dtype)))

    def clear(self) -> None:
        """Everybody knows all: chunks have been gathered as they are."""
        self._beside, self._saved = [], []

    def gather_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        if m.K > 1:
            for b in m.buckets:
                yield CommOp("allgather", "group", m.K * self.wire.nbytes(m.shard(b)), "parameters")

    def shards(self) -> dict[str, list[Tensor]]:
        """Between two steps."""
        kept = self._beside or self._saved
        return {PARAMETERS: list(kept)} if kept else {}

    def resume_from(self, kept: Sequence[Tensor]) -> None:
        """Go on with what `chunks` gave."""
        self._beside, self._saved = [], kept
