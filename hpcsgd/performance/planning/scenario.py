"""An estimate as a scenario of ``hpcsgd simulate``: for stragglers, failures and all else that a sum of
seconds does not know."""

from __future__ import annotations

import tomli_w

from hpcsgd.core.waits import All, Living, Slowest, Then, Unknown
from hpcsgd.cost.traffic import BY_TORCH, ops_of_sync
from hpcsgd.errors import UserError, count_text, located
from hpcsgd.performance.planning.estimate import Estimate
from hpcsgd.performance.simulation.rules import rule_of

STEPS = 1000
IN_THE_GROUP = ("gradients", "allocation", "indices", "values", BY_TORCH)
AT_THE_END = "parameters"
"""Phases; what is left is between groups."""


def scenario_of(e: Estimate) -> str:
    """TOML. What leaves behind the backward pass counts as far as it is not hidden there.

    Raises `UserError` for a method of which nobody can tell beforehand how groups wait for each other.
    """
    waits = e.plan.waits
    with located(f"--scenario: {e.option}"):
        rule_of(waits)
        if isinstance(waits, Then | Unknown):
            raise UserError("a scenario has the seconds of one method: plan each of the two by itself")
    phases = dict(e.step.phases)
    compute = phases.pop("compute")
    exchange = sum(phases.pop(name, 0.0) for name in IN_THE_GROUP)
    messages = {"exchange_seconds": exchange, "gather_seconds": phases.pop(AT_THE_END, 0.0)}
    between = sum(phases.values())
    if isinstance(waits, All | Living):
        messages["model_average_seconds"] = _model_average(e, between, waits)
    else:
        senders = max(e.ranks_per_host // e.K, 1)
        period = float(waits.period or 1)
        sent = _messages(e)
        messages["link_seconds"] = (e.step.behind or between) * period / senders / sent if sent else 0.0
    scenario = {
        "job": {
            "groups": e.P,
            "group_size": e.K,
            "ranks_per_host": e.ranks_per_host,
            "batch_size": e.B,
            "steps": STEPS,
            "steps_per_epoch": e.steps_per_epoch,
        },
        "compute": {"name": "constant", "mean_seconds": compute},
        "messages": messages,
        "method": dict(e.option.table),
    }
    return f"# {e.option} on {count_text(e.N, 'rank')}, by hpcsgd plan\n\n{tomli_w.dumps(scenario)}"


def _model_average(e: Estimate, waited: float, waits: All | Living) -> float:
    """Seconds of a meeting. Rules know no links: where it arrives steps later, and shares links with its
    group's own messages, it takes so long that groups stand still for as long as was estimated."""
    period = float(waits.period or 1)
    if not e.step.behind:
        return waited * period
    if waited == 0:
        return e.step.behind * period
    late = waits.late if isinstance(waits, All) else 0
    return waited * period + (e.step.seconds - waited) * min(late, period)


def _messages(e: Estimate) -> float:
    """Those that a group sends when groups synchronize, on the mean: a push to a server and the answer to it
    are one in the simulation."""
    (stage,) = e.sequence
    sent = sum(
        x.times * x.sender_fraction for x in ops_of_sync(stage.plan, e.sizes) if x.operation == "exchange"
    )
    return sent / 2 if isinstance(e.plan.waits, Slowest) else sent
