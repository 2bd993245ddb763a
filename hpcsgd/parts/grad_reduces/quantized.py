"""A dense gradient reduction in fewer bits, and a quantized gather of the updated shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Work, accumulation_dtype
from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import parts_of
from hpcsgd.core.optional import comm_ops, memory_bytes
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, ReduceContext, StepContext
from hpcsgd.core.topology import Topology
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.parts.grad_reduces.dense import AllToAll
from hpcsgd.parts.grad_reduces.quantized_gather import PARAMETERS, QuantizedShards
from hpcsgd.parts.quantizers.base import Quantizer, noise_for
from hpcsgd.parts.quantizers.mean import mean_of_own, mean_on_all, padded, sent_by_mean

INTRA_GROUP, INTER_GROUP = "intra_group", "inter_group"
"""The two places where a quantization error arises: in the group and across groups.

`INTER_GROUP` is also the name of the second kind of errors in a saved state.
"""


@checked
class Quantized:
    """Gradient reduction like `AllToAll`, with gradients and updated parameters in fewer bits.

    Means are computed in float32, in rank order.

    - Gradients: what rounding to the nearest loses is kept and added to the next gradient (error feedback).
    - Parameters: a rank sends how its shard differs from the value that the other ranks have. What
      quantization leaves out is part of the next difference. The optimizer updates the exact shard, so small
      updates are never lost.

    A checkpoint includes these errors and differences.

    Args:
        gradients: Format in which gradients are sent, such as `quantizers.bf16()`, `quantizers.fp16()` or
            `quantizers.int8()`. In a job file: ``gradients = "int8"`` or ``{ name = "int8", block = 128 }``.
            Default None: their own dtype.
        parameters: Format in which updated shards are sent in the group, as for `gradients`. Default None:
            their own dtype.

    Shape:
        M parameters in total; each rank owns M/K of them. Error feedback of gradients keeps M elements per
        rank, and M/K more if groups reduce gradients together. Quantized parameters keep M/K elements per
        rank.

    Example:
        >>> formats = hpcsgd.quantizers
        >>> grad_reduce = hpcsgd.Quantized(gradients=formats.bf16(), parameters=formats.int8())
        >>> method = hpcsgd.hierarchical(8, grad_reduce)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> sent = topology.world.stats.totals()
        >>> round(sent["grad_reduce"].bytes), round(sent["param_gather"].bytes)     # of AllToAll: 272 each
        (136, 80)

    References:
        G. Wang et al.: ZeRO++, 2023 (arXiv:2306.10209), which sends weights and gradients in blocks of few
        bits. Here with error feedback (S. P. Karimireddy et al., ICML 2019), and with differences of
        parameters.

    See Also:
        `Sparse`: leaves elements out.
    """

    def __init__(self, gradients: Quantizer | None = None, parameters: Quantizer | None = None) -> None:
        self.gradients, self.parameters = gradients, parameters
        self._t = 0
        self._plain: GradReduce = AllToAll()
        self.traits = replace(AllToAll.traits, keeps_gradients=gradients is not None and gradients.keeps)
        self._kept: RoundingErrors | None = None
        self._saved = State()
        self._gather = None if parameters is None else QuantizedShards(parameters)

    def across_groups(self) -> Quantized:
        """Return a reduction that also averages each gradient shard over the groups, in the same format."""
        made = Quantized(self.gradients, self.parameters)
        made.traits, made._plain = replace(self.traits, across=True), AllToAll().across_groups()
        return made

    def idle(self, topology: Topology) -> bool:
        return self._plain.idle(topology)

    def __call__(self, d: ReduceContext, b: Bucket) -> Work | None:
        if self.idle(d.topology):
            return None
        if self.gradients is None:
            return self._plain(d, b)
        if self._kept is None and self.gradients.keeps:
            self._kept = RoundingErrors(d, self.traits.across, self._saved)
            self._saved = State()
        i = next(i for i, each in enumerate(d.buckets) if each is b)
        mean = b.grad_shard
        if d.topology.group_size > 1:
            x = (
                b.g.to(accumulation_dtype(b.g.dtype), copy=True)
                if self._kept is None
                else self._kept.add(INTRA_GROUP, i, b.g)
            )
            mean = mean_of_own(
                x, d.topology.intra_group, self.gradients, partial(noise_for, d.topology.rank, self._t, i, 0)
            )
        t = self._t
        self._t += i + 1 == len(d.buckets)
        if self.traits.across and d.topology.num_groups > 1:
            return d.topology.inter_group.run(
                partial(self._across, d, b, mean, i, t), "mean of packed gradients", b.g, mean
            )
        b.grad_shard.copy_(mean)
        return None

    def _across(self, d: ReduceContext, b: Bucket, mean: Tensor, i: int, t: int) -> None:
        """Average `mean`, the group's mean gradient shard of bucket i, over the groups.

        Meanwhile the next bucket is reduced in the group. `t` is the number of the reduction, for the noise.
        """
        assert self.gradients is not None
        x = (
            padded(mean, d.topology.num_groups)
            if self._kept is None
            else self._kept.add(INTER_GROUP, i, mean)
        )
        dice = partial(noise_for, d.topology.rank, t, i, 1)
        b.grad_shard.copy_(
            mean_on_all(x, d.topology.inter_group, self.gradients, dice)[: b.grad_shard.numel()]
        )

    def memory_bytes(self, m: ModelLayout) -> float:
        published = m.own_elements(wide=True) if self.quantizes_gather and m.K > 1 else 0
        if self.gradients is None:
            return published + memory_bytes((part for _, part in parts_of("", self._plain)), m)
        in_group = m.K * m.own_elements(wide=True) if m.K > 1 else 0
        across = sum(-(-m.shard(b) // m.P) * m.P * b.wide for b in m.buckets) if m.P > 1 else 0
        return published + self.gradients.keeps * (in_group + self.traits.across * across)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        if self.gradients is None:
            yield from comm_ops(self._plain, m)
            return
        for i, b in enumerate(m.buckets):
            if m.K > 1:
                code = self.gradients.nbytes(m.shard(b))
                yield CommOp("alltoall", "intra_group", m.K * code, bucket=i, reduced=b.padded)
            if self.traits.across and m.P > 1:
                yield from (replace(x, bucket=i) for x in sent_by_mean(self.gradients, m.shard(b), m))

    @property
    def quantizes_gather(self) -> bool:
        return self._gather is not None

    def restore(self, s: StepContext) -> None:
        assert self._gather is not None
        self._gather.restore(s)

    def gather(self, s: StepContext) -> None:
        assert self._gather is not None
        self._gather.gather(s)

    def clear(self) -> None:
        assert self._gather is not None
        self._gather.clear()

    def gather_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        assert self._gather is not None
        return self._gather.gather_ops(m)

    def state_dict(self) -> State:
        published = {} if self._gather is None else self._gather.shards()
        kept = self._saved if self._kept is None else self._kept.state_dict()
        return replace(kept, replicated={"t": self._t}, sharded={**published, **kept.sharded})

    def load_state_dict(self, state: State) -> None:
        sharded = dict(state.sharded)
        published = sharded.pop(PARAMETERS, [])
        if self._gather is not None:
            self._gather.resume_from(published)
        self._t = state.replicated["t"]
        self._kept, self._saved = None, State(sharded=sharded, per_rank_params=state.per_rank_params)


class RoundingErrors:
    """The errors of quantized gradients, which are added to the gradients of the next step.

    For each bucket there are the errors of `g` from the reduction in the group, and those of `grad_shard`
    from the average across groups.
    """

    def __init__(self, d: ReduceContext, across: bool, saved: State) -> None:
        self._slots = [b.slots for b in d.buckets]
        self._sizes = [b.grad_shard.numel() for b in d.buckets]
        self._room: dict[str, list[Tensor]] = {}
        if d.topology.group_size > 1:
            self._room[INTRA_GROUP] = [
                torch.zeros_like(b.g, dtype=accumulation_dtype(b.g.dtype)) for b in d.buckets
            ]
        if across and d.topology.num_groups > 1:
            self._room[INTER_GROUP] = [
                padded(torch.zeros_like(b.grad_shard), d.topology.num_groups) for b in d.buckets
            ]
        self._load(saved)

    def add(self, where: str, i: int, x: Tensor) -> Tensor:
        """Add `x` to the error of bucket i that arose at `where`, and return the sum.

        The sum is not a copy: the caller must overwrite it with the new error.
        """
        room = self._room[where][i]
        room[: x.numel()] += x
        return room

    def state_dict(self) -> State:
        state = State()
        if INTRA_GROUP in self._room:
            state.per_rank_params["kept"] = self._layers()
        if INTER_GROUP in self._room:
            rooms = zip(self._room[INTER_GROUP], self._sizes, strict=True)
            state.sharded[INTER_GROUP] = [x[:size] for x, size in rooms]
        return state

    def _layers(self) -> dict[str, Tensor]:
        rooms = zip(self._slots, self._room[INTRA_GROUP], strict=True)
        return {slot.name: x[slot.start : slot.stop] for slots, x in rooms for slot in slots}

    def _load(self, saved: State) -> None:
        kept = saved.per_rank_params.get("kept", {})
        if INTRA_GROUP in self._room:
            for name, x in self._layers().items():
                if name in kept:
                    x.copy_(kept[name])
        if INTER_GROUP in self._room:
            for x, before in zip(self._room[INTER_GROUP], saved.sharded.get(INTER_GROUP, []), strict=False):
                x[: before.numel()] = before
