"""NoLoCo: local SGD whose groups take outer momentum steps in pairs and never average all together.

J. Kolehmainen, N. Blagoev, J. Donaghy, O. Ersoy, C. Nies: NoLoCo: No-all-reduce Low Communication Training
Method for Large Models, 2025 (arXiv:2506.10911). Group i has the model θ_i, the slow weights φ_i and the
outer momentum δ_i. Δ_i = θ_i − φ_i is its movement in H inner steps. Each synchronization draws new subgroups
of n groups at random; j runs over those of a subgroup:

    δ_i ← α·δ_i + (β/n) Σ_j Δ_j − γ·(φ_i − (1/n) Σ_j φ_j)
    φ_i ← φ_i + δ_i,  θ_i ← φ_i

We read α = 0.5, β = 0.7 and n = 2 in the paper. We are not sure of its γ and derived our own.

The choice of γ: without Δ the groups must converge to each other. With x_i = φ_i − mean φ, let V, C, D be the
means of x², xδ, δ² over groups and draws, and V', C', D' those after a synchronization. Partners are drawn
among all other groups. So the means of (x_i − x_j)²/4 and of x_i·(x_i − x_j)/2 are κV, with κ = P/(2(P−1))
(1/2 if P is odd, because one group is then left alone), and

    D' = α²D − 2αγκC + γ²κV,   C' = αC − γκV + D',   V' = V + 2(αC − γκV) + D'

This is a contraction for 0 < γ < 2(1 − α²)/(1 + α − 2ακ) and for no other γ. The bound is smallest for many
groups, where κ is 1/2. So **0 < γ < 2(1 − α²)** is right for every P; for the paper's α it means up to 1.5.
The default is the middle of this range.

Differences from the paper: the paper's worker is a group here, and each rank exchanges the shard that it owns
with the same rank of another group. It sends one vector of that size. With y_i = β·Δ_i + γ·φ_i a pair i, j
has

    δ_i ← α·δ_i + β·Δ_i + (y_j − y_i)/2

This is the same equation. Each y_i counts as it was rounded for sending, so that rounding does not change the
mean of a pair. If the number of groups is odd, the groups take turns at being left alone (n = 1) and then
have no last term. The paper's pipelines with random routes are not implemented.
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
    """The averager in which pairs of groups take an outer step, with slow weights φ and momentum δ.

    A rank keeps the φ and δ of the shards that it owns. The formulas are those of the module docstring.
    """

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
        """Before the first update, make the slow weights φ and the momentum δ, or load their saved values."""
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
            self._sendrecv(s, partner, found, moved)
        for own, phi, delta in zip(found, self._phi, self._delta, strict=True):
            own.copy_(phi.add_(delta))
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        """Return the bytes of the slow weights φ, the momentum δ and the two message buffers."""
        return 2 * m.own_elements(wide=True) + 2 * m.message_buffer()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the operation that sends y_i = β·Δ_i + γ·φ_i to one other group, the partner."""
        away = 0.0 if m.groups_per_host >= m.P else (m.P - m.groups_per_host) / (m.P - 1)
        paired = m.P // 2 * 2 / m.P
        return [
            CommOp(
                "sendrecv", "inter_group", m.message_buffer(), off_host_fraction=away, sender_fraction=paired
            )
        ]

    def state_dict(self) -> State:
        return State(sharded={"phi": self._phi, "delta": self._delta}) if self._phi else self._saved

    def load_state_dict(self, state: State) -> None:
        """Store `state`; `prepare` loads φ and δ from it at the next step."""
        self._saved, self._phi, self._delta = state, [], []

    def _sendrecv(self, s: StepContext, partner: int, like: Sequence[Tensor], moved: list[Tensor]) -> None:
        """Exchange y with group `partner` (j), and apply δ_i ← δ_i + (y_j − y_i)/2.

        `moved` has the movement Δ_i and is overwritten with y_i. y is sent in the dtypes of `like`.
        """
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
    """Return local SGD with outer momentum, whose groups synchronize in random pairs only.

    The models of the groups differ: evaluate inside `optimizer.averaged_model()`.

    Args:
        sync_every: Steps between two synchronizations (the paper's H), at least 1.
        alpha: Outer momentum α, 0 ≤ α < 1. Default 0.5.
        beta: Outer learning rate β, above 0. Default 0.7.
        gamma: Strength γ with which the slow weights of a pair are drawn together, 0 < γ < 2(1 − α²). Outside
            this range groups would drift away from each other. Default None: 1 − α².
        seed: Seed of the draw. Together with the step it determines the pairs. Default 0.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `sync_every` is below 1, or α, β or γ is outside these bounds.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends M/K elements to one other rank per
        synchronization. It keeps the slow weights φ and the momentum δ, M/K elements each.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.noloco(sync_every=2))
        >>> train(optimizer, steps=4)
        >>> with optimizer.averaged_model() as D:
        ...     D > 0
        True

    References:
        J. Kolehmainen, N. Blagoev, J. Donaghy, O. Ersoy, C. Nies: NoLoCo: No-all-reduce Low Communication
        Training Method for Large Models, 2025 (arXiv:2506.10911).

    See Also:
        `diloco`: all groups synchronize and share the same slow weights.
        `ad_psgd`: asynchronous pairs without an outer step.
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
            "diverge",
            key="gamma",
            value=gamma,
        )
    when = Every(sync_every)
    return Method(
        grad_reduce=grad_reduce,
        schedule=when,
        averager=PairOuterStep(Pairs(seed, sync_every), alpha, beta, gamma),
    )
