"""SparseLoCo: groups send 1/64 of their movement since the last synchronization, in 2 bits per value.

A. Sarfi, B. Thérien, J. Lidin, E. Belilovsky: Communication Efficient LLM Pre-training with SparseLoCo, 2025
(arXiv:2508.15706), algorithm 1. From the common model θ each of R workers takes H steps of the inner
optimizer, to θ_r. With the worker's error feedback e_r and the outer learning rate α:

    Δ_r = θ − θ_r
    e_r ← β·e_r + Δ_r
    Δ̂_r = Q(TopK(e_r))
    e_r ← e_r − Δ̂_r
    θ ← θ − α·(1/R) Σ_r Δ̂_r

TopK keeps the k largest magnitudes of every 4096 consecutive elements, Q quantizes to 2 bits per value, and
all workers gather all Δ̂_r. The error feedback e_r, with its decay β, replaces an outer momentum.

Differences from the paper:

- The paper's worker is a group here. Each rank runs these lines for the shards that it owns, and keeps M/K
  elements of θ and of e.
- Δ_r is measured from θ rounded to the parameters' dtype, which may have 16 bits; θ and e are float32.
- Blocks and k count only parameters; padding between and after them is never sent.
- Q keeps a sign and one of two bfloat16 sizes for every 64 consecutive values (`quantizers.levels`). If any
  of the 64 is 0, the smaller size is 0, too, so that a weight with nothing to send does not change. With 4, 8
  or 16 bits Q is `quantizers.int4`, `int8` or `bf16`; with 32 bits there is no quantization.
- Indices are encoded by `kernels.chosen`, in 8 bits each at the density of 1/64.
- With `outer_schedule`, α changes during the run.
- How many elements of which block are sent is a separate choice: `PerBlock` is the paper's, `AcrossShards` is
  our own.
- `mean` and `clip` change how messages become one change of θ; see `sparse_message`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Traits
from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.core.waits import All
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import PerBlock, WithDistance, WithOptimizerState, keep_state
from hpcsgd.parts.averagers.selection import Selection
from hpcsgd.parts.averagers.sparse_message import (
    MedianNorm,
    MessageMean,
    OverGroups,
    SparseMessage,
    gathered,
    norms,
)
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.outer_schedules.base import OuterSchedule, require_useful
from hpcsgd.parts.quantizers import bf16, int4, int8
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.quantizers.levels import Levels
from hpcsgd.parts.quantizers.whole import Whole
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.sparsifiers.base import require_density

VALUES: Mapping[int, Quantizer] = {2: Levels(), 4: int4(), 8: int8(), 16: bf16(), 32: Whole()}
"""The quantizer of values for each number of bits."""


class SparseDelta:
    """The averager in which groups send a part of their movement and keep the rest for the next time.

    On each rank it keeps two vectors of M/K elements, shaped like the rank's shards: the common model θ and
    the error feedback e.
    """

    traits = Traits(All(), reads_gradients=False, vectors_only=True)

    def __init__(
        self,
        density: float,
        values: Quantizer,
        beta: float,
        lr: float,
        select: Selection,
        schedule: OuterSchedule | None,
        mean: MessageMean,
        clip: MedianNorm | None,
    ) -> None:
        self.density, self.values, self.beta, self.lr, self.select = density, values, beta, lr, select
        self.schedule, self.mean, self.clip = schedule, mean, clip
        self._theta: list[Tensor] = []
        self._error: list[Tensor] = []
        self._filled: list[list[slice]] = []
        """The parts of each shard that are not padding."""
        self._saved = State()

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.topology.num_groups > 1 and not self._theta:
            self._start(vectors, s.filled(vectors))

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        assert self._theta
        found = list(vectors)
        owned, thetas, errors = (self._without_padding(x) for x in (found, self._theta, self._error))
        for own, theta, e in zip(owned, thetas, errors, strict=True):
            e.mul_(self.beta).add_(theta.to(own.dtype).to(theta.dtype) - own)
        codes = [
            SparseMessage(share, self.values)
            for share in self.select.shares(errors, self.density, s.topology)
        ]
        s.agreement().wait()
        said, lr = gathered(codes, errors, s.topology), self._lr(s)
        factors = self._factors(s, codes, said)
        for i, (own, theta, e) in enumerate(zip(owned, thetas, errors, strict=True)):
            theta.add_(self._mean(codes[i], said[i], e, s.topology.inter_group.rank, factors), alpha=-lr)
            own.copy_(theta)
        return found

    def _lr(self, s: StepContext) -> float:
        """Return α, and report it if `schedule` sets it."""
        if self.schedule is None:
            return self.lr
        lr = self.schedule.at(s.t, s.topology.num_groups).lr
        assert lr is not None
        s.metrics["outer_lr"] = lr
        return lr

    def _factors(
        self, s: StepContext, codes: Sequence[SparseMessage], said: Sequence[Sequence[Tensor]]
    ) -> list[float]:
        """Return the factor of each group's messages, and report that of this group if `clip` sets it."""
        if self.clip is None:
            return [1.0] * s.topology.num_groups
        factors = self.clip.factors(norms(codes, said, s.topology))
        s.metrics["clip_factor"] = factors[s.topology.inter_group.rank]
        return factors

    def memory_bytes(self, m: ModelLayout) -> float:
        return 2 * m.own_elements(wide=True)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from self.select.comm_ops(m)
        counts = (n for b in m.buckets for n in m.filled(b) if n)
        shares = (self.select.expected(n, self.density) for n in counts)
        nbytes = sum(SparseMessage(share, self.values).nbytes for share in shares)
        if nbytes:
            yield CommOp("allgather", "inter_group", m.P * nbytes / m.K)
        if self.clip is not None:
            yield allreduce("intra_group", FLOAT64 * m.P)

    def state_dict(self) -> State:
        return State(sharded={"theta": self._theta, "error": self._error}) if self._theta else self._saved

    def load_state_dict(self, state: State) -> None:
        """Store `state`; `prepare` loads θ and e from it at the next step."""
        self._saved, self._theta, self._error = state, [], []

    def _start(self, owned: Sequence[Tensor], filled: list[list[slice]]) -> None:
        """Set θ to the groups' common model `owned` and e to zero, or both to their saved values."""
        self._filled = filled
        kept, self._saved = self._saved.sharded, State()
        theta = kept.get("theta", owned)
        self._theta = [
            x.to(accumulation_dtype(own.dtype), copy=True) for x, own in zip(theta, owned, strict=True)
        ]
        self._error = [torch.zeros_like(x) for x in self._theta]
        for e, saved in zip(self._error, kept.get("error", ()), strict=False):
            e.copy_(saved)

    def _without_padding(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Return views of `chunks` without their padding; one empty view if this rank owns no elements."""
        pairs = zip(chunks, self._filled, strict=True)
        return [chunk[run] for chunk, runs in pairs for run in runs] or [chunks[0][:0]]

    def _mean(
        self,
        code: SparseMessage,
        said: Sequence[Tensor],
        e: Tensor,
        mine: int,
        factors: Sequence[float],
    ) -> Tensor:
        """Return the mean over the groups of the messages `said` about one vector, times their `factors`.

        Subtract from `e`, the error feedback of this vector, what this group (`mine`) sent. If that was not
        finite, and is left out therefore, the error feedback starts anew.
        """
        total = torch.zeros_like(e)
        sent: list[Tensor] = []
        for group, part in enumerate(said if code.count else ()):
            places, values = code.read(part.contiguous())
            values = values.to(e.dtype)
            if group == mine:
                e[places] -= values
            if factors[group]:
                total[places] += values * factors[group]
                sent.append(places)
        if not factors[mine]:
            e.zero_()
        self.mean.divide(total, sent)
        return total


@method(cite="sarfi2025sparseloco", delayable=True)
@checked
def sparseloco(
    sync_every: int,
    density: float = 1 / 64,
    bits: int = 2,
    beta: float = 0.95,
    lr: float = 1.0,
    selection: Selection = PerBlock(),  # noqa: B008 - frozen
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
    outer_schedule: OuterSchedule | None = None,
    mean: MessageMean = OverGroups(),  # noqa: B008 - frozen
    clip: MedianNorm | None = None,
) -> Method:
    """Return SparseLoCo: groups send few elements of their movement in few bits, and the rest later.

    An evaluation sees the mean of the groups' models.

    Args:
        sync_every: Steps between two synchronizations (the paper's H), at least 1. The paper uses some tens.
        density: Fraction of the elements that is sent, > 0 and ≤ 1. Default 0.015625: 64 of 4096.
        bits: Bits per value: 2, 4, 8, 16 or 32. Default 2, the paper's.
        beta: Decay β of the error feedback per synchronization, ≥ 0 and ≤ 1. Default 0.95.
        lr: Outer learning rate α, > 0. Default 1.0.
        selection: How many elements are selected in which part of the shards: `PerBlock()` or
            `AcrossShards()`. Default PerBlock(size=4096).
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        optimizer_state: What happens to the inner optimizer's state at a synchronization: `keep_state`,
            `AverageState` or `ResetState`. Default keep_state.
        outer_schedule: Outer learning rate over the run, such as `outer_schedules.piecewise(...)`, in place
            of `lr`. Default None: `lr`.
        mean: The mean of the groups' messages: `OverGroups()`, or `OverSenders()` with a smaller `lr`.
            Default OverGroups(), the paper's.
        clip: Limit of what a group sends, `MedianNorm()`, against groups that break down. Default None: none.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `sync_every` is below 1, another argument is outside these bounds, or `outer_schedule`
            has a momentum.

    Shape:
        M parameters in total; each rank owns M/K of them. With the defaults, a rank receives 84 bytes per
        4096 elements of its shards from every other group per synchronization. It keeps the common model θ
        and the error feedback, M/K elements each.

    Note:
        After a synchronization, `optimizer.metrics["distance"]` is the distance from the resulting model.

    Example:
        >>> method = hpcsgd.sparseloco(sync_every=2, density=0.1)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["distance"] > 0
        True

    References:
        A. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025 (arXiv:2508.15706),
        algorithm 1. Other values of `mean` and `clip` have papers of their own.

    See Also:
        `diloco`: sends the whole movement, to an outer optimizer.
        `Sparse`: sends a part of every gradient inside a group.
    """
    require_density(density)
    if bits not in VALUES:
        raise UserError(f"bits = {bits!r}: expected {', '.join(map(str, VALUES))}", key="bits", value=bits)
    if not 0 <= beta <= 1:
        raise UserError(f"beta = {beta}: what is left of the feedback, ≥ 0 and ≤ 1", key="beta", value=beta)
    if not 0 < lr < math.inf:
        raise UserError(f"lr = {lr}: an outer learning rate, > 0", key="lr", value=lr)
    when = Every(sync_every)
    if outer_schedule is not None:
        require_useful(outer_schedule, sync_every)
        _require_lr_alone(outer_schedule, lr)
    how = WithDistance(
        SparseDelta(density, VALUES[bits], beta, float(lr), selection, outer_schedule, mean, clip)
    )
    return Method(grad_reduce=grad_reduce, schedule=when, averager=optimizer_state(how))


def _require_lr_alone(schedule: OuterSchedule, lr: float) -> None:
    values = schedule.at(0, 2)
    if values.momentum is not None or values.lr is None:
        raise UserError(
            "outer_schedule: sparseloco has no outer momentum: expected a schedule of lr alone",
            key="outer_schedule",
        )
    if lr != 1:
        raise UserError(f"lr = {lr}: outer_schedule sets the rate: give one of the two", key="lr", value=lr)
