"""The forms in which a plan is shown: a table, a recommendation in words, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpcsgd.cost.price import StepCost
from hpcsgd.errors import count_text
from hpcsgd.performance.planning.estimate import Estimate

HEAD = (
    f"{'method':<34} {'ranks':>6} {'P × K':>11} {'nodes':>5}  {'s/step':>8} {'(from – to)':>17} "
    f"{'comm':>5} {'samples/s':>10} {'epoch':>9} {'in all':>9} {'node h':>8} {'eff.':>5} {'MB/rank':>8}"
)

LEAST = 0.005
"""Phases that take a smaller share of a step are not shown."""


def row(e: Estimate) -> str:
    """Return the estimate's row of the table, and a row per stage if the method changes in the run."""
    first = (
        f"{str(e.option)[:34]:<34} {e.N:>6} {f'{e.P} × {e.K}':>11} {e.nodes:>5}  {_step(e.step)} "
        f"{e.samples_per_s:>10,.0f} {_time(e.epoch_seconds):>9} "
        f"{_time(3600 * e.hours):>9} {e.node_hours:>8.3g} {e.efficiency:>5.0%} {e.memory / 1e6:>8,.0f}"
    )
    if len(e.sequence) == 1:
        return first
    stages = zip(("first", *("then" for _ in e.sequence[1:])), e.sequence, strict=True)
    names = ((f"  {word} {count_text(stage.steps, 'step')}", stage.step) for word, stage in stages)
    return "\n".join([first, *(f"{name:<59} {_step(step)}" for name, step in names)])


def _step(step: StepCost) -> str:
    interval = f"({step.low:.3g} – {step.high:.3g})"
    return f"{step.seconds:>8.3g} {interval:>17} {step.communication:>5.0%}"


def in_words(best: Estimate, why: str) -> str:
    """Return the recommendation, its reason `why`, and the shares of a step's phases, as text."""
    phases = sorted(best.step.phases.items(), key=lambda phase: -phase[1])
    parts = {name: seconds / best.step.seconds for name, seconds in phases}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= LEAST)
    where = "1 node" if best.nodes == 1 else f"{best.nodes} nodes"
    return (
        f"recommended: {best.option} in {count_text(best.P, 'group')} of {best.K} on {where}: {why}.\n"
        f"A step is {shares}; {best.step.hidden:.3g} s of communication are hidden behind computing."
    )


def to_json(estimates: Sequence[Estimate], why: str, about: Mapping[str, Any]) -> str:
    """Return all `estimates` as JSON. The first one is the recommended one, for the reason `why`."""
    rows = [_numbers(e) for e in estimates]
    return json.dumps({**about, "why": why, "choice": rows[0], "rows": rows}, indent=1) + "\n"


def _numbers(e: Estimate) -> dict[str, Any]:
    low, high = e.epoch_interval
    stages = [{"steps": stage.steps, **_of_step(stage.step)} for stage in e.sequence]
    return {
        "method": dict(e.option.table),
        "label": str(e.option),
        "ranks": e.N,
        "groups": e.P,
        "group_size": e.K,
        "nodes": e.nodes,
        **_of_step(e.step),
        "stages": stages if len(stages) > 1 else [],
        "samples_per_s": e.samples_per_s,
        "epoch_seconds": e.epoch_seconds,
        "epoch_seconds_low": low,
        "epoch_seconds_high": high,
        "hours": e.hours,
        "node_hours": e.node_hours,
        "efficiency": e.efficiency,
        "memory_bytes_per_rank": e.memory,
    }


def _of_step(step: StepCost) -> dict[str, Any]:
    return {
        "step_seconds": step.seconds,
        "step_seconds_low": step.low,
        "step_seconds_high": step.high,
        "seconds_per_phase": dict(step.phases),
        "hidden_seconds": step.hidden,
        "communication_share": step.communication,
        "bytes_per_rank_and_step": step.nbytes,
        "bytes_by_torch_per_rank_and_step": step.by_torch,
    }


def _time(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
