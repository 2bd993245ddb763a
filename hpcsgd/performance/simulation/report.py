"""The forms in which a simulation is shown: text lines and a JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hpcsgd.errors import count_text
from hpcsgd.performance.simulation.failures import Checkpointing
from hpcsgd.performance.simulation.rank_times import WAITING
from hpcsgd.performance.simulation.simulate import Simulated


def lines(simulated: Simulated) -> list[str]:
    """Return lines about speed, waiting and failures, like those at the end of a training."""
    of, layout = simulated.of, simulated.of.layout
    lines = [
        f"job       {count_text(layout.P, 'group')} of {count_text(layout.K, 'rank')} on "
        f"{count_text(layout.hosts, 'host')}: {of.waits}",
        f"trained   {count_text(of.steps, 'step')} in {_time(simulated.seconds)}",
        f"speed     {simulated.steps_per_second:.4g} steps/s, {simulated.samples_per_second:,.4g} samples/s",
        f"time      {_shares({k: v for k, v in simulated.shares.items() if k not in WAITING})}",
        f"waiting   {_shares({k: v for k, v in simulated.shares.items() if k in WAITING}) or 'none'}",
    ]
    if simulated.syncs:
        lines.append(f"late      {_late(simulated)}")
    if of.failures:
        lines.append(f"goodput   {simulated.goodput:.1%}")
    if simulated.checkpointing:
        lines += _checkpointing(simulated.checkpointing)
    return lines


def record(simulated: Simulated) -> dict[str, Any]:
    """Return the results as a JSON object."""
    layout, stats = simulated.of.layout, simulated.stats
    saving = simulated.checkpointing
    return {
        "groups": layout.P,
        "group_size": layout.K,
        "hosts": layout.hosts,
        "waits": str(simulated.of.waits),
        "steps": simulated.of.steps,
        "seconds": simulated.seconds,
        "steps_per_second": simulated.steps_per_second,
        "samples_per_second": simulated.samples_per_second,
        "goodput": simulated.goodput,
        "shares": simulated.shares,
        "lost": simulated.lost,
        "syncs": [asdict(sync) for sync in simulated.syncs],
        "checkpointing": None if saving is None else vars(saving),
        "by_step": {
            "first_seconds": stats.first.tolist(),
            "mean_seconds": stats.mean.tolist(),
            "last_seconds": stats.last.tolist(),
        },
    }


def _late(simulated: Simulated) -> str:
    """Return how often groups were left out of a synchronization, and what of their steps is lost."""
    left_out = sum(simulated.of.layout.P - len(sync.members) for sync in simulated.syncs)
    return f"left out of synchronizations {count_text(left_out, 'time')}, {simulated.lost:.1%} of steps lost"


def _checkpointing(saving: Checkpointing) -> list[str]:
    spent = sum(saving.seconds.values())
    return [
        f"failures  one every {_time(saving.mtbf_seconds)}; "
        f"{_shares({name: seconds / spent for name, seconds in saving.seconds.items()})}",
        f"saving    every {_time(saving.interval_seconds)}; best {_time(saving.best_seconds)} "
        f"({saving.best_goodput:.1%}), Young {_time(saving.young_seconds)}, "
        f"Daly {_time(saving.daly_seconds)}",
    ]


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.0005)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.4g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{seconds / 60:.1f} min" if hours < 2 else f"{hours} h {minutes:02} min"
