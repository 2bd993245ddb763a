"""An estimate as a scenario of ``hpcsgd simulate``: for stragglers, failures and all else that a sum of
seconds does not know."""

from __future__ import annotations

import inspect
from typing import Any

import tomli_w

from hpcsgd.cost.traffic import BY_TORCH
from hpcsgd.errors import UserError, count_text
from hpcsgd.planning.estimate import Estimate
from hpcsgd.simulation.course import Rule
from hpcsgd.simulation.rules import RULES
from hpcsgd.simulation.scenario import PARTS

STEPS = 1000
IN_THE_GROUP = ("gradients", "allocation", "indices", "values", BY_TORCH)
AT_THE_END = "parameters"
"""Phases; what is left is between groups."""


def scenario_of(e: Estimate) -> str:
    """TOML. What leaves behind the backward pass counts as far as it is not hidden there.

    Raises `UserError` for a method of which nobody has written how groups wait for each other.
    """
    table = _rule(e)
    phases = dict(e.step.phases)
    compute = phases.pop("compute")
    exchange = sum(phases.pop(name, 0.0) for name in IN_THE_GROUP)
    messages = {"exchange_seconds": exchange, "gather_seconds": phases.pop(AT_THE_END, 0.0)}
    between = sum(phases.values())
    sent = PARTS.make(Rule, table, "[method]").messages(e.P)
    if sent:
        senders = max(e.ranks_per_host // e.K, 1)
        messages["link_seconds"] = (e.step.behind or between) / senders / sent
    else:
        every = table.get("method", table).get("every", 1)  # of the method inside, where there is one
        messages["meeting_seconds"] = _late(e, between, every, table) if e.step.behind else between * every
    scenario = {
        "job": {
            "groups": e.P,
            "group_size": e.K,
            "ranks_per_host": e.ranks_per_host,
            "batch_size": e.B,
            "steps": STEPS,
        },
        "compute": {"name": "constant", "mean_seconds": compute},
        "messages": messages,
        "method": table,
    }
    return f"# {e.option} on {count_text(e.N, 'rank')}, by hpcsgd plan\n\n{tomli_w.dumps(scenario)}"


def _late(e: Estimate, waited: float, every: int, table: dict[str, Any]) -> float:
    """Seconds of a meeting that arrives steps later. Rules know no links: where it shares them with its
    group's own messages it takes so long that groups stand still for as long as was estimated."""
    if waited == 0:
        return e.step.behind * every
    return waited * every + (e.step.seconds - waited) * table["steps"]


def _rule(e: Estimate) -> dict[str, Any]:
    """As `hpcsgd simulate` calls it."""
    table = e.option.table
    name = table["name"]
    if name not in RULES:
        raise UserError(f"--scenario: hpcsgd simulate knows {', '.join(RULES)}, and not {name}")
    known = inspect.signature(RULES[name]).parameters
    return {"name": name, **{key: value for key, value in table.items() if key in known}}
