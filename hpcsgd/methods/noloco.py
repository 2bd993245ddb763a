"""NoLoCo: outer steps with momentum, for which groups meet in pairs and never all together.

J. Kolehmainen, N. Blagoev, J. Donaghy, O. Ersoy, C. Nies: NoLoCo: No-all-reduce Low Communication Training
Method for Large Models, 2025 (arXiv:2506.10911). With φ_i, the slow weights of group i, Δ_i = θ_i − φ_i,
how it moved in H inner steps, and subgroups of n that are drawn by lot anew each time:

    δ_i ← α·δ_i + (β/n) Σ_j Δ_j − γ·(φ_i − (1/n) Σ_j φ_j)
    φ_i ← φ_i + δ_i,  θ_i ← φ_i

α = 0.5, β = 0.7 and n = 2 are the paper's as we read it; its γ we do not know for sure, and derived our own.

Which γ: without Δ the groups are to come together. Of x_i = φ_i − mean φ and δ_i let V, C, D be the means
of x², xδ, δ², over groups and draws. Partners being drawn among all others, the mean of (x_i − x_j)²/4 and
that of x_i·(x_i − x_j)/2 are κV, with κ = P/(2(P−1)) (1/2 where P is odd and one is left alone), and so

    D' = α²D − 2αγκC + γ²κV,   C' = αC − γκV + D',   V' = V + 2(αC − γκV) + D'

which is a contraction for 0 < γ < 2(1 − α²)/(1 + α − 2ακ) and no other γ. The bound is least for many
groups, where κ is 1/2: **0 < γ < 2(1 − α²)** is right for every P, for the α of the paper up to 1.5. The
default is its middle.

Differences from the paper: its worker is a group here, and each position of it meets the same position of
another group with the chunk that it owns. It sends one vector of that size: with y_i = β·Δ_i + γ·φ_i a pair
i, j has

    δ_i ← α·δ_i + β·Δ_i + (y_j − y_i)/2

the same equation, in which y_i counts as it travels, so that rounding leaves the mean of a pair as it is.
Of an odd number of groups one after the other is left alone, n = 1, and has no last term. The paper's
pipelines with random routes are not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Traits
from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import Pairs
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import Every

PAPER = r"""
@misc{kolehmainen2025noloco,
  title = {{NoLoCo}: No-all-reduce Low Communication Training Method for Large Models},
  author = {Kolehmainen, Jari and Blagoev, Nikolay and Donaghy, John and Ersoy, O{\u g}uzhan and Nies, Christopher},
  year = {2025},
  eprint = {2506.10911},
  archivePrefix = {arXiv},
}
"""  # noqa: E501


class PairOuterStep:
    """An outer step by what this group and another one bring; φ and δ are those of the own chunk."""

    def __init__(self, pairs: Pairs, alpha: float, beta: float, gamma: float) -> None:
        self.pairs = pairs
        self.traits = Traits(pairs, reads_gradients=False, vectors_only=True)
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self._phi: list[Tensor] = []
        self._delta: list[Tensor] = []
        self._saved = State()
        self._sent: MessageBuffer | None = None
        self._arrived: MessageBuffer | None = None

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Before the first one φ is where all begin."""
        if s.topology.num_groups > 1 and not self._phi:
            kept, self._saved = self._saved.sharded, State()
            self._phi = kept.get("phi") or [_accumulated(own) for own in vectors]
            self._delta = kept.get("delta") or [x.new_zeros(x.shape) for x in self._phi]

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        moved = [
            own.to(phi.dtype) - phi.to(own.dtype).to(phi.dtype)
            for own, phi in zip(found, self._phi, strict=True)
        ]
        for delta, by in zip(self._delta, moved, strict=True):
            delta.mul_(self.alpha).add_(by, alpha=self.beta)
        partner = self.pairs.partners(s.t, s.topology.num_groups).get(s.topology.group_index)
        if partner is not None:
            self._exchange(s, partner, found, moved)
        for own, phi, delta in zip(found, self._phi, self._delta, strict=True):
            own.copy_(phi.add_(delta))
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        """φ and δ, and the two parcels."""
        return 2 * m.own_elements(wide=True) + 2 * m.message_buffer()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """y_i to one other."""
        away = 0.0 if m.groups_per_host >= m.P else (m.P - m.groups_per_host) / (m.P - 1)
        paired = m.P // 2 * 2 / m.P
        return [
            CommOp("exchange", "cross", m.message_buffer(), off_host_fraction=away, sender_fraction=paired)
        ]

    def state_dict(self) -> State:
        return State(sharded={"phi": self._phi, "delta": self._delta}) if self._phi else self._saved

    def load_state_dict(self, state: State) -> None:
        """It counts from the next step on."""
        self._saved, self._phi, self._delta = state, [], []

    def _exchange(self, s: StepContext, partner: int, like: Sequence[Tensor], moved: list[Tensor]) -> None:
        """δ_i ← δ_i + (y_j − y_i)/2; what travels is `like` this."""
        y = [by.mul_(self.beta).add_(phi, alpha=self.gamma) for by, phi in zip(moved, self._phi, strict=True)]
        self._sent = self._sent or MessageBuffer.like(like)
        self._arrived = self._arrived or MessageBuffer.like(like)
        self._sent.pack(y)
        s.topology.inter_group.sendrecv({partner: self._sent.bytes}, {partner: self._arrived.bytes}).wait()
        self._arrived.add_to(self._delta, 0.5)
        self._sent.add_to(self._delta, -0.5)


def _accumulated(own: Tensor) -> Tensor:
    return own.to(accumulation_dtype(own.dtype), copy=True)


@method(cite=PAPER, delayable=True)
@checked
def noloco(
    sync_every: int,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float | None = None,
    seed: int = 0,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
) -> Method:
    """Local SGD with an outer momentum, whose groups meet in pairs drawn by lot: no message goes to all.

    A rank sends M/K elements to one other at a meeting, and keeps φ and δ, M/K each. Groups' models differ:
    evaluate inside `optimizer.averaged_model()`.

    Not to be confused with `diloco`, where all groups meet and have one θ, nor with `ad_psgd`, whose pairs
    have no outer step and wait for nobody.

    Args:
        sync_every: H, steps from one meeting to the next, at least 1.
        alpha: α, the outer momentum: 0 ≤ α < 1. Default 0.5.
        beta: β, the outer learning rate, above 0. Default 0.7.
        gamma: γ, how strongly the slow weights of a pair are drawn together: 0 < γ < 2(1 − α²), or groups
            would drift apart. Default None, which is 1 − α².
        seed: partners follow from it and the step. Default 0.
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().

    Raises:
        UserError: for `sync_every` below 1, and for α, β and γ outside these bounds.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.noloco(sync_every=2))
        >>> train(optimizer, steps=4)
        >>> with optimizer.averaged_model() as D:
        ...     D > 0
        True

    Source:
        J. Kolehmainen, N. Blagoev, J. Donaghy, O. Ersoy, C. Nies: NoLoCo: No-all-reduce Low Communication
        Training Method for Large Models, 2025 (arXiv:2506.10911).
    """
    if not 0 <= alpha < 1:
        raise UserError(f"alpha = {alpha}: expected a momentum ≥ 0 and < 1", key="alpha", value=alpha)
    if not 0 < beta < float("inf"):
        raise UserError(f"beta = {beta}: expected an outer learning rate > 0", key="beta", value=beta)
    most = 2 * (1 - alpha**2)
    gamma = most / 2 if gamma is None else gamma
    if not 0 < gamma < most:
        raise UserError(
            f"gamma = {gamma}: expected more than 0 and less than 2·(1 − alpha²) = {most:.4g}, or groups "
            "drift apart",
            key="gamma",
            value=gamma,
        )
    when = Every(sync_every)
    return Method(
        grad_reduce=grad_reduce,
        schedule=when,
        averager=PairOuterStep(Pairs(seed, sync_every), alpha, beta, gamma),
    )
