"""AdaComm: groups synchronize rarely at first, and more often as the loss falls.

J. Wang, G. Joshi: Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
Local-Update SGD, SysML 2019 (arXiv:1810.08313), section 4. I is the number of steps between two
synchronizations, η the learning rate, F(w) the loss; I_0, η_0 and F(w_0) are their initial values. After
every block of training

    I ← ⌈√(η_0/η · F(w)/F(w_0)) · I_0⌉     if that is less than the previous I
    I ← ⌈γ·I⌉, γ = 1/2                     otherwise, because the loss did not fall enough

Differences from the paper:

- A block is a number of steps, not of seconds, and ends at a synchronization. So a repeated run gives the
  same bits, and all ranks decide alike.
- F(w) is the mean training loss of the block over all ranks, at the groups' own models. F(w_0) is the mean
  loss of the first step.
- η_0 is the highest learning rate so far, since a warm-up starts lower.
- If the learning rate fell from η_before to η since the last change of I, the previous I is multiplied by
  √(η_before/η) first. Without this factor, γ would undo the longer interval that a lower rate allows.
- The loss must be positive.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, phase
from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import FLOAT64, CommOp, ModelLayout, allreduce
from hpcsgd.core.traits import ScheduleTraits
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import WithDistance, WithOptimizerState, keep_state, mean_by
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.quantizers.base import Quantizer

PAPER = """
@inproceedings{wang2019adacomm,
  title = {Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update
  {SGD}}, author = {Wang, Jianyu and Joshi, Gauri},
  booktitle = {Conference on Systems and Machine Learning (SysML)},
  year = {2019},
  eprint = {1810.08313},
  archivePrefix = {arXiv},
}
"""

GAMMA = 1 / 2


@dataclass
class BlockState:
    """The progress of a rank in the current block of training; only the losses differ between ranks."""

    I: int  # noqa: E741 - the papers' letter
    """The current number of steps between two synchronizations."""
    since_sync: int = 0
    """Steps since the last synchronization."""
    since_change: int = 0
    """Steps since the last change of I."""
    losses: float = 0.0
    """The sum of the losses since the last change of I."""
    first_loss: float | None = None
    eta_before: float = 0.0
    """The learning rate at the last change of I."""
    eta_0: float = 0.0


class Adaptive:
    """The schedule with I steps between synchronizations; every `block` steps, I adapts to the loss.

    I changes at the first synchronization at which `block` or more steps have passed since its last change.
    """

    def __init__(self, I_0: int, block: int) -> None:
        for name, value in (("initial_sync_every", I_0), ("adapt_every", block)):
            if type(value) is not int or value < 1:
                raise UserError(f"{name} = {value!r}: expected a number of steps ≥ 1", key=name, value=value)
        self.I_0 = I_0
        self.block = block
        self.block_state = BlockState(I_0)
        self._world: Communicator | None = None
        """The communicator of all ranks; None before the first step."""

    @property
    def traits(self) -> ScheduleTraits:
        """The traits of this schedule; `rate` is 1/I, the current share of steps that synchronize."""
        return ScheduleTraits(rate=1 / self.block_state.I)

    def __call__(self, s: StepContext) -> bool:
        now = self.block_state
        self._count(s)
        s.metrics["interval"] = now.I
        if now.since_sync < now.I:
            return False
        now.since_sync = 0
        if now.since_change >= self.block:
            self._change(s)
        return True

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        """Return the allreduce of the losses F(w) and F(w_0), which runs once per block."""
        interval = self.block_state.I
        once = 1 / (math.ceil(self.block / interval) * interval)
        return [allreduce("world", 2 * FLOAT64).within("loss", once)]

    def state_dict(self) -> State:
        """Return the state with the losses averaged over all ranks. Collective.

        Only these means enter the equations, so every rank can continue from the state of any other.
        """
        same = asdict(self.block_state)
        losses, first = (same.pop(name) for name in ("losses", "first_loss"))
        if first is None:
            return State(replicated=same, mean={"losses": losses})
        if self._world is not None:
            losses, first = _means(self._world, losses, first)
        return State(replicated=same, mean={"losses": losses, "first_loss": first})

    def load_state_dict(self, state: State) -> None:
        known: dict[str, Any] = {**state.replicated, **state.mean}
        self.block_state = BlockState(**known)

    def _count(self, s: StepContext) -> None:
        if s.loss is None:
            raise UserError(
                "adacomm needs the training loss: give it as optimizer.step(loss=loss), or give step() a "
                "closure that returns it"
            )
        now, loss, self._world = self.block_state, float(s.loss), s.topology.world
        if now.first_loss is None:
            now.first_loss, now.eta_before = loss, s.lr
        now.losses += loss
        now.since_sync += 1
        now.since_change += 1
        now.eta_0 = max(now.eta_0, s.lr)

    def _change(self, s: StepContext) -> None:
        """Compute the new I and begin a new block. Collective over all ranks; sends 16 bytes."""
        now = self.block_state
        with phase("loss"):
            F, F_0 = self._over_all_ranks(s)
        if not (math.isfinite(F) and F_0 > 0):
            raise UserError(f"adacomm: the loss was {F_0} at first and is {F} now: expected more than 0")
        fallen_in_all, fallen = (eta / s.lr if s.lr > 0 else 1.0 for eta in (now.eta_0, now.eta_before))
        new = math.ceil(math.sqrt(fallen_in_all * max(F, 0.0) / F_0) * self.I_0)
        old = math.sqrt(max(fallen, 1.0)) * now.I
        now.I = max(new if new < old else math.ceil(GAMMA * old), 1)
        now.since_change, now.losses, now.eta_before = 0, 0.0, s.lr

    def _over_all_ranks(self, s: StepContext) -> list[float]:
        """Return F(w) and F(w_0): the mean losses of this block and of the first step, over all ranks."""
        now = self.block_state
        assert now.first_loss is not None
        return _means(s.topology.world, now.losses / now.since_change, now.first_loss)


def _means(ranks: Communicator, *numbers: float) -> list[float]:
    """Return the mean of each of `numbers` over all ranks. Collective."""
    means = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    ranks.allreduce(means, "mean").wait()
    return [mean.item() for mean in means]


@method(cite=PAPER, delayable=True)
@checked
def adacomm(
    initial_sync_every: int,
    adapt_every: int,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
    quantize: Quantizer | None = None,
) -> Method:
    """Return local SGD whose groups synchronize rarely at first, and more often as the loss falls.

    It needs the training loss in every step: `optimizer.step(loss=loss)`.

    Args:
        initial_sync_every: Steps between two synchronizations at first (I_0). Begin with the largest value
            with which the model trains at all.
        adapt_every: Steps after which the interval is chosen anew, at the next synchronization. In a job file
            it can be ``adapt_every = { epoch = 1 }``. The paper measures it in seconds.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        optimizer_state: What happens to momentum and other optimizer state at a synchronization:
            `keep_state`, `AverageState` or `ResetState`. Default keep_state.
        quantize: Format in which shards travel at a synchronization, such as `quantizers.bf16()`,
            `quantizers.int8()` or `quantizers.int4()`. Default None: their own dtype.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `initial_sync_every` or `adapt_every` is not a whole number ≥ 1; in a step without a
            loss; when the interval is chosen anew, if the first loss was not positive or the current one is
            not finite.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends 2·(P−1)/P·M/K elements per
        synchronization. A new interval costs an allreduce of 16 bytes.

    Note:
        After every step, `optimizer.metrics["interval"]` is the current I, the steps between two
        synchronizations. After a synchronization, `optimizer.metrics["distance"]` is the model distance.

    Example:
        >>> method = hpcsgd.adacomm(initial_sync_every=4, adapt_every=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> for x, y in DataLoader(data, batch_size=16, sampler=hpcsgd.Sampler(data, topology)):
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     _ = optimizer.step(loss=loss)
        >>> optimizer.metrics["interval"]
        4

    References:
        J. Wang, G. Joshi: Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
        Local-Update SGD, SysML 2019 (arXiv:1810.08313), section 4.

    See Also:
        `selsync`: decides by the gradient, in every step.
    """
    return Method(
        grad_reduce=grad_reduce,
        schedule=Adaptive(initial_sync_every, adapt_every),
        averager=optimizer_state(WithDistance(mean_by(quantize))),
    )
