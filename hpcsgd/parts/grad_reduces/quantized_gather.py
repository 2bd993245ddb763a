"""A quantized gather of the updated shards, in which no update is lost.

All ranks of a group have the value p of a shard, and only its owner has the exact value x. e is the
difference x − p. In a step

    x ← p + e                                      before the update
    x ← the optimizer's update of x, and the result of a synchronization
    q ← the quantized difference x − p             sent to all ranks of the group
    p ← p + the decoded q                          on all ranks, also the owner: the same bits
    e ← x − p                                      what quantization left out, part of the next difference

The difference of one step is small, so that a few bits describe it better than the same number of bits would
describe the shard. The rounding error e is sent later, so that updates of any size take effect. Code that
changes p on all ranks between two steps (loading a checkpoint, averaging models) thereby changes x by the
same amount.
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
"""The name of the differences e (module docstring) in a saved state."""


class QuantizedShards:
    """The quantized gather of this rank's shards; keeps what is needed to restore the exact shards x.

    That is one vector per bucket: the difference e between two steps, and p, the value on all ranks, within a
    step.
    """

    def __init__(self, wire: Quantizer) -> None:
        self.wire = wire
        self._beside: list[Tensor] = []
        self._saved: Sequence[Tensor] = []

    def restore(self, s: StepContext) -> None:
        """Replace p, the value on all ranks, in `param_shard` of every bucket by x, the exact value."""
        if s.topology.group_size == 1:  # no other rank has p, so only the e of a loaded state is added
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
        """Gather the quantized changes x − p of all ranks' shards, and add them to `w`. Collective."""
        if s.topology.group_size == 1:
            return
        for i, (b, p) in enumerate(zip(s.buckets, self._beside, strict=True)):
            x = b.param_shard.to(p.dtype, copy=True)
            b.param_shard.copy_(p)
            # Noise depends on the shard index and not on the group, so that groups with equal models, as with
            # `bsp`, keep equal models.
            moved = gathered(
                x - p, s.topology.intra_group, self.wire, noise_for(s.topology.shard_index, s.t, i, 2)
            )
            b.w.copy_(b.w.to(p.dtype).add_(moved))
            p.copy_(x.sub_(b.param_shard.to(p.dtype)))

    def clear(self) -> None:
        """Discard the differences e, because the shards have been gathered unquantized."""
        self._beside, self._saved = [], []

    def gather_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        if m.K > 1:
            for b in m.buckets:
                yield CommOp("allgather", "intra_group", m.K * self.wire.nbytes(m.shard(b)), "param_gather")

    def shards(self) -> dict[str, list[Tensor]]:
        """Return {`PARAMETERS`: the difference e of every bucket}, or {} if there are none.

        Must be called between two steps.
        """
        kept = self._beside or self._saved
        return {PARAMETERS: list(kept)} if kept else {}

    def resume_from(self, kept: Sequence[Tensor]) -> None:
        """Continue with the differences e in `kept`, which `shards` returned when the state was saved."""
        self._beside, self._saved = [], kept
