"""SparseLoCo: of what groups have learned between two meetings a hundredth is sent, in two bits.

A. Sarfi, B. Thérien, J. Lidin, E. Belilovsky: Communication Efficient LLM Pre-training with SparseLoCo, 2025
(arXiv:2508.15706), algorithm 1. From θ every worker r takes H steps of the inner optimizer, to θ_r:

    Δ_r = θ − θ_r
    e_r ← β·e_r + Δ_r
    Δ̂_r = Q(TopK(e_r))
    e_r ← e_r − Δ̂_r
    θ ← θ − α·(1/R) Σ_r Δ̂_r

TopK keeps the k largest magnitudes of every 4096 consecutive elements, Q is for 2 bits a value, and all
workers gather all Δ̂_r. The feedback e_r, with its decay β, has the place of an outer momentum.

Differences from the paper: its worker is a group here, and each position does this for the chunks it owns,
with M/K elements of θ and of e. Δ_r counts from θ as parameters have it, of 16 bits perhaps; θ and e are
float32. The elements that runs and their k count are parameters: padding between and behind them is never
sent. Q has a sign and one of two sizes, bfloat16, for every 64 values in their order (`quantizers.levels`).
Where any of the 64 is 0 the smaller size is 0, too, so that a weight with nothing to send does not move;
with 4, 8 or 16 bits it is that of `quantizers.int4`, `int8` or `bf16`, with 32 there is none. Indices travel
by `kernels.chosen`, 8 bits each at the density of 1/64. How many are taken from where is a part of its own:
`PerBlock` is the paper's, `AcrossShards` is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Traits
from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import All
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import PerBlock, WithDistance, WithOptimizerState, keep_state
from hpcsgd.parts.averagers.selection import Selection
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.quantizers import bf16, int4, int8
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.quantizers.levels import Levels
from hpcsgd.parts.quantizers.whole import Whole
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.sparsifiers.base import Share, require_density

VALUES: Mapping[int, Quantizer] = {2: Levels(), 4: int4(), 8: int8(), 16: bf16(), 32: Whole()}
"""How values travel, by their bits."""


@dataclass(frozen=True)
class SparseMessage:
    """What a group says of one vector: which elements, and their values. Its size is that of the share."""

    share: Share
    values: Quantizer

    @property
    def count(self) -> int:
        return int(self.share.k.sum())

    @property
    def nbytes(self) -> int:
        return self._places() + self.values.nbytes(self.count)

    def write(self, e: Tensor, code: Tensor) -> None:
        chosen = self.share.largest_of(e)
        places = kernels.encode_chosen(chosen, *self._segments())
        code[: places.numel()] = places
        self.values.encode(e[chosen].float(), code[self._places() :], 0)

    def read(self, code: Tensor) -> tuple[Tensor, Tensor]:
        places = code[: kernels.chosen_bytes(*self._segments())]
        values = torch.empty(self.count, dtype=torch.float32, device=code.device)
        self.values.decode(code[self._places() :], values)
        return kernels.decode_chosen(places, *self._segments()), values

    def _segments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.share.starts, self.share.stops, self.share.k

    def _places(self) -> int:
        """Their bytes, so many that values begin where a float may."""
        return -(-kernels.chosen_bytes(*self._segments()) // 4) * 4


class SparseDelta:
    """Groups tell how they moved, in part: what they do not say they keep for the next time.

    Takes room for two chunks, θ and e, M/K elements each.
    """

    traits = Traits(All(), reads_gradients=False, vectors_only=True)

    def __init__(self, density: float, values: Quantizer, beta: float, lr: float, select: Selection) -> None:
        self.density, self.values, self.beta, self.lr, self.select = density, values, beta, lr, select
        self._theta: list[Tensor] = []
        self._error: list[Tensor] = []
        self._filled: list[list[slice]] = []
        """Of each chunk what is not padding."""
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
        said = self._gathered(s, codes, errors)
        for i, (own, theta, e) in enumerate(zip(owned, thetas, errors, strict=True)):
            theta.add_(self._mean(codes[i], said[i], e, s.topology.inter_group.rank), alpha=-self.lr)
            own.copy_(theta)
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        return 2 * m.own_elements(wide=True)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from self.select.comm_ops(m)
        counts = (n for b in m.buckets for n in m.filled(b) if n)
        shares = (self.select.expected(n, self.density) for n in counts)
        nbytes = sum(SparseMessage(share, self.values).nbytes for share in shares)
        if nbytes:
            yield CommOp("allgather", "cross", m.P * nbytes / m.K)

    def state_dict(self) -> State:
        return State(sharded={"theta": self._theta, "error": self._error}) if self._theta else self._saved

    def load_state_dict(self, state: State) -> None:
        """It counts from the next step on."""
        self._saved, self._theta, self._error = state, [], []

    def _start(self, owned: Sequence[Tensor], filled: list[list[slice]]) -> None:
        """From what all groups have, or as it was saved."""
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
        """Views, one for each run of parameters; at least one, since a position may own nothing."""
        pairs = zip(chunks, self._filled, strict=True)
        return [chunk[run] for chunk, runs in pairs for run in runs] or [chunks[0][:0]]

    def _gathered(
        self, s: StepContext, codes: Sequence[SparseMessage], errors: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Of every vector, what each group says of it. Collective."""
        sizes = [code.nbytes for code in codes]
        mine = torch.zeros(sum(sizes), dtype=torch.uint8, device=errors[0].device)
        for code, e, part in zip(codes, errors, torch.split(mine, sizes), strict=True):
            if code.count:  # of a fragment a position may own nothing
                code.write(e, part)
        rows = mine.new_empty((s.topology.num_groups, mine.numel()))
        if mine.numel():
            s.topology.inter_group.allgather(rows.view(-1), mine).wait()
        return [list(column) for column in torch.split(rows, sizes, dim=1)]

    def _mean(self, code: SparseMessage, said: Sequence[Tensor], e: Tensor, mine: int) -> Tensor:
        """Of what groups say; takes from e what this one said."""
        total = torch.zeros_like(e)
        for group, part in enumerate(said if code.count else ()):
            where, what = code.read(part.contiguous())
            total[where] += what.to(e.dtype)
            if group == mine:
                e[where] -= what.to(e.dtype)
        return total.div_(len(said))


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
) -> Method:
    """Local SGD whose groups tell a small part of how they moved in few bits, and keep the rest for later.

    A rank keeps the model of the last meeting and what it has not said, M/K elements each. At a meeting it
    receives from every other group 84 bytes for 4096 elements of its chunks, with the defaults. Noted there:
    `distance`, to what groups leave it with. An evaluation sees the mean of the groups' models.

    Not to be confused with `diloco`, whose outer optimizer sees all that groups moved, nor with `Sparse`,
    which sends a part of every gradient inside a group.

    Args:
        sync_every: H, steps from one meeting to the next, at least 1; the paper's are some tens.
        density: the share of elements that is sent, > 0 and ≤ 1. Default 0.015625: 64 of 4096.
        bits: of a value: 2, 4, 8, 16 or 32. Default 2, the paper's.
        beta: β, what is left of the feedback at the next meeting, ≥ 0 and ≤ 1. Default 0.95.
        lr: α, the outer learning rate, > 0. Default 1.0.
        selection: how many elements are taken from where: `PerBlock()` or `AcrossShards()`. Default
            PerBlock(size=4096).
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().
        optimizer_state: what becomes of the inner optimizer's momentum at a meeting: `keep_state`,
            `AverageState` or `ResetState`. Default keep_state.

    Raises:
        UserError: for `sync_every` below 1, other bits, and numbers outside these bounds.

    Example:
        >>> method = hpcsgd.sparseloco(sync_every=2, density=0.1)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["distance"] > 0
        True

    Source:
        A. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025 (arXiv:2508.15706),
        algorithm 1.
    """
    require_density(density)
    if bits not in VALUES:
        raise UserError(f"bits = {bits!r}: expected {', '.join(map(str, VALUES))}", key="bits", value=bits)
    if not 0 <= beta <= 1:
        raise UserError(f"beta = {beta}: what is left of the feedback, ≥ 0 and ≤ 1", key="beta", value=beta)
    if not 0 < lr < math.inf:
        raise UserError(f"lr = {lr}: an outer learning rate, > 0", key="lr", value=lr)
    how = WithDistance(SparseDelta(density, VALUES[bits], beta, float(lr), selection))
    return Method(grad_reduce=grad_reduce, schedule=Every(sync_every), averager=optimizer_state(how))
