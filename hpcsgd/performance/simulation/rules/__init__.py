"""Rules that say when groups wait for each other, and the choice of a rule for a method."""

from __future__ import annotations

from hpcsgd.core.waits import (
    All,
    InNeighbors,
    Living,
    Pairs,
    Period,
    RandomPartner,
    Slowest,
    Then,
    Unknown,
    Waits,
)
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation.rules.ad_psgd import AdPsgd
from hpcsgd.performance.simulation.rules.changing import Changing
from hpcsgd.performance.simulation.rules.delayed import Delayed
from hpcsgd.performance.simulation.rules.ensemble import Ensemble
from hpcsgd.performance.simulation.rules.ensemble_with_quorum import EnsembleWithQuorum
from hpcsgd.performance.simulation.rules.push import Paired, Push
from hpcsgd.performance.simulation.rules.server import AsyncSgd, Ssp
from hpcsgd.performance.simulation.rules.synchronous import Synchronous
from hpcsgd.performance.simulation.simulated_run import Rule

__all__ = [
    "AdPsgd",
    "AsyncSgd",
    "Changing",
    "Delayed",
    "Ensemble",
    "EnsembleWithQuorum",
    "Paired",
    "Push",
    "Ssp",
    "Synchronous",
    "rule_of",
]


def rule_of(waits: Waits) -> Rule:
    """Return the rule that simulates `waits`.

    Raises:
        UserError: If the waits depend on the training, or if no rule covers the method's messages.
    """
    match waits:
        case Unknown(why):
            raise UserError(f"this method cannot be simulated: {why}")
        case Then(first, then, at):
            if at is None:
                raise UserError(
                    "this method cannot be simulated: when the learning rate falls is not known beforehand; "
                    'name = "switch" with at = a number of steps can be'
                )
            return Changing(rule_of(first), rule_of(then), at)
        case All(late, period):
            period = _known(period)
            return Delayed(period, late) if late else Synchronous(period)
        case Living(period, quorum):
            every = _known(period)
            return Ensemble(every) if quorum is None else EnsembleWithQuorum(every, quorum)
        case InNeighbors(graph, late, period):
            return Push(graph, late, _known(period))
        case Pairs(_, _, _, period):
            return Paired(waits, _known(period))
        case Slowest(staleness, period):
            every = _whole(period)
            return AsyncSgd(every) if staleness is None else Ssp(staleness, every)
        case RandomPartner(seed, period):
            _each_step(period)
            return AdPsgd(seed)


def _known(period: Period | None) -> Period:
    if period is None:
        raise UserError(
            "this method cannot be simulated: after which steps groups average depends on the training"
        )
    if period < 1:
        raise UserError(f"period = {period}: groups synchronize after 1 step or more")
    return period


def _whole(period: Period | None) -> int:
    known = _known(period)
    if not isinstance(known, int):
        raise UserError(
            f"groups that ask a server synchronize after a whole number of steps, and not {known}"
        )
    return known


def _each_step(period: Period | None) -> None:
    if _known(period) != 1:
        raise UserError(
            f"this method cannot be simulated: its groups send messages after every {period} steps; with "
            "random partners the simulation knows messages after every step"
        )
