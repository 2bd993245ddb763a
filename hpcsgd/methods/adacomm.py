"""AdaComm: groups meet seldom at first, and the more often the less loss is left.

J. Wang, G. Joshi: Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
Local-Update SGD, SysML 2019 (arXiv:1810.08313), section 4. For every block of training

    I ← ⌈√(η_0/η · F(w)/F(w_0)) · I_0⌉     where that is less than the I before
    I ← ⌈γ·I⌉, γ = 1/2                     elsewhere: the loss did not fall enough

Differences from the paper: a block is so many steps and not so many seconds, and ends at a meeting, so that a
run has the same bits again and all ranks decide alike. F(w) is the mean of the training losses of the block
over all ranks, at the groups' own models; F(w_0) that of the very first step. η_0 is the highest rate so far:
a warm-up starts below it. Where the rate fell since the last change, the I before counts as √(η_before/η)
times itself, or γ would take back what a lower rate allows. The loss must be positive.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from hpcsgd.averagers import AroundMoments, Mean, Measured, kept
from hpcsgd.core.step import Exchange, Method, State, Step
from hpcsgd.errors import UserError
from hpcsgd.exchanges import AllToAll
from hpcsgd.transport import phase

GAMMA = 1 / 2


@dataclass
class BlockState:
    """Where in its block a rank is; the same on all ranks but for the losses."""

    I: int  # noqa: E741 - the papers' letter
    since_meeting: int = 0
    """Steps; also of the next two."""
    since_change: int = 0
    losses: float = 0.0
    """Their sum since the last change."""
    first_loss: float | None = None
    eta_before: float = 0.0
    """The learning rate at the last change."""
    eta_0: float = 0.0


class Adaptive:
    """Meetings after every I steps; at the first one after `block` steps I changes."""

    def __init__(self, interval: int, block: int) -> None:
        for name, value in (("interval", interval), ("block", block)):
            if type(value) is not int or value < 1:
                raise UserError(f"{name} = {value!r}: expected a number of steps ≥ 1")
        self.I_0 = interval
        self.block = block
        self.block_state = BlockState(interval)

    def __call__(self, s: Step) -> bool:
        now = self.block_state
        self._count(s)
        s.notes["interval"] = now.I
        if now.since_meeting < now.I:
            return False
        now.since_meeting = 0
        if now.since_change >= self.block:
            self._change(s)
        return True

    def state_dict(self) -> State:
        same = asdict(self.block_state)
        mean = {name: same.pop(name) for name in ("losses", "first_loss")}
        return {"same": same, "mean": {name: value for name, value in mean.items() if value is not None}}

    def load_state_dict(self, state: State) -> None:
        self.block_state = BlockState(**state["same"], **state.get("mean", {}))

    def _count(self, s: Step) -> None:
        if s.loss is None:
            raise UserError(
                "adacomm goes by the training loss: give it as optimizer.step(loss=loss), or give step() a "
                "closure that returns it"
            )
        now = self.block_state
        if now.first_loss is None:
            now.first_loss, now.eta_before = s.loss, s.lr
        now.losses += s.loss
        now.since_meeting += 1
        now.since_change += 1
        now.eta_0 = max(now.eta_0, s.lr)

    def _change(self, s: Step) -> None:
        """Collective over all ranks: 16 bytes."""
        now = self.block_state
        F, F_0 = self._over_all_ranks(s)
        if not (math.isfinite(F) and F_0 > 0):
            raise UserError(f"adacomm: the loss was {F_0} at first and is {F} now: expected more than 0")
        fallen_in_all, fallen = (eta / s.lr if s.lr > 0 else 1.0 for eta in (now.eta_0, now.eta_before))
        new = math.ceil(math.sqrt(fallen_in_all * max(F, 0.0) / F_0) * self.I_0)
        old = math.sqrt(max(fallen, 1.0)) * now.I
        now.I = max(new if new < old else math.ceil(GAMMA * old), 1)
        now.since_change, now.losses, now.eta_before = 0, 0.0, s.lr

    def _over_all_ranks(self, s: Step) -> list[float]:
        """F(w) and F(w_0)."""
        now = self.block_state
        means = torch.tensor([now.losses / now.since_change, now.first_loss], dtype=torch.float64)
        with phase("loss"):
            s.job.world.allreduce(means, "mean").wait()
        return means.tolist()


def adacomm(
    interval: int,
    block: int,
    exchange: Exchange = AllToAll(),  # noqa: B008 - frozen
    moments: AroundMoments = kept,
) -> Method:
    """Local SGD with meetings after every `interval` (I_0) steps at first; about every `block` steps the
    interval is chosen anew by the loss, which `optimizer.step(loss=loss)` has to be given.

    A job file may say ``block = { epoch = 1 }``. Noted in every step: the `interval` in force.
    """
    return Method(exchange=exchange, when=Adaptive(interval, block), how=moments(Measured(Mean())))
