"""Turn an estimate into a scenario of ``hpcsgd simulate``.

An estimate only adds seconds. A simulation also covers stragglers, failures and other effects.
"""

from __future__ import annotations

import tomli_w

from hpcsgd.core.waits import All, Living, Slowest, Then, Unknown
from hpcsgd.cost.traffic import BY_TORCH, ops_of_sync
from hpcsgd.errors import UserError, count_text, located
from hpcsgd.performance.planning.estimate import Estimate
from hpcsgd.performance.simulation.rules import rule_of

STEPS = 1000
IN_THE_GROUP = ("grad_reduce", "allocation", "indices", "values", BY_TORCH)
AT_THE_END = "param_gather"
"""`IN_THE_GROUP` and `AT_THE_END` are phases inside a group. All other phases are between groups."""


def scenario_of(e: Estimate) -> str:
    """Return the scenario of the estimate `e` as TOML, with only the exposed seconds of reductions.

    Raises `UserError` if no simulation rule describes how the method's groups wait for each other.
    """
    waits = e.plan.waits
    with located(f"--scenario: {e.option}"):
        rule_of(waits)
        if isinstance(waits, Then | Unknown):
            raise UserError("a scenario has the seconds of one method: plan each of the two by itself")
    phases = dict(e.step.phases)
    compute = phases.pop("compute")
    grad_reduce = sum(phases.pop(name, 0.0) for name in IN_THE_GROUP)
    messages = {"grad_reduce_seconds": grad_reduce, "gather_seconds": phases.pop(AT_THE_END, 0.0)}
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
    """Return the seconds of a model average.

    `waited`: seconds per step that groups wait for the average. The simulation does not model that a delayed
    average shares links with the messages inside a group. So the duration of a delayed average is chosen so
    that the simulated groups wait as long as the estimate says.
    """
    period = float(waits.period or 1)
    if not e.step.behind:
        return waited * period
    if waited == 0:
        return e.step.behind * period
    late = waits.late if isinstance(waits, All) else 0
    return waited * period + (e.step.seconds - waited) * min(late, period)


def _messages(e: Estimate) -> float:
    """Return the mean number of messages that a group sends per synchronization.

    In the simulation, a push to a server and its answer are one message.
    """
    (stage,) = e.sequence
    sent = sum(
        x.times * x.sender_fraction for x in ops_of_sync(stage.plan, e.sizes) if x.operation == "sendrecv"
    )
    return sent / 2 if isinstance(e.plan.waits, Slowest) else sent
