"""The forms in which a probe is shown: a table, an answer in words, JSON, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcsgd.errors import count_text
from hpcsgd.files.pictures import save
from hpcsgd.performance.probing.probe import Probe, Row
from hpcsgd.train.growth import COMPARED, Growth, Verdict, ideal

HEAD = (
    f"{'P':>4}  {'lr':>8}  {'D':>9}  {'ρ (quartiles)':>20}  {'ρ/ideal':>7}  {'loss':>8}  "
    f"{'at equal samples':>16}  {'samples/s':>9}"
)


def table_row(probe: Probe) -> str:
    """Return the table row of the number of groups that was measured last."""
    row = probe.rows[-1]
    if row.diverged is not None:
        syncs = count_text(len(row.distances[-1]), "synchronization")
        return f"{row.P:>4}  {row.lr:>8.4g}  diverged after {syncs}: {row.diverged}"
    loss = row.losses[-1][-1]
    equal = probe.loss_after_equal_samples(row)
    cells = f"{row.P:>4}  {row.lr:>8.4g}  {row.D:>9.4g}  {_rho(probe)}  {loss:>8.4g}  {equal:>16.4g}"
    return f"{cells}  {row.samples / row.seconds:>9,.0f}"


def _rho(probe: Probe) -> str:
    if len(probe.rows) == 1:
        return " " * 29
    g = probe.growths[-1]
    share = g.rho / ideal(g.P, g.further, probe.plan.rule)
    return f"{g.rho:.2f} ({g.low:.2f}–{g.high:.2f})".rjust(20) + f"  {share:>7.2f}"


def answer(probe: Probe) -> str:
    """Return, as text, the number of groups that the probe found, the reason, and any objection."""
    found = probe.verdict
    lines = [_verdict(probe, found)]
    if (objection := probe.objection()) is not None:
        lines.append(f"but {objection}")
    return "\n".join(lines)


def _verdict(probe: Probe, found: Verdict) -> str:
    threshold = probe.plan.threshold
    if probe.diverged is not None and found.P == probe.rows[-2].P:
        return f"P = {found.P}: with {count_text(probe.diverged.P, 'group')} the training diverged"
    if found.unclear is not None:
        near = next(g for g in probe.growths if g.P == found.P)
        reason = f"ρ = {near.rho:.2f} ({near.low:.2f}–{near.high:.2f}) is too near {threshold} for its spread"
        return (
            f"P = {found.P}; not clear between {found.P} and {found.unclear}: {reason}, probe with more seeds"
        )
    if not found.final:
        return f"P = {found.P} or more: D still grew with P at the largest that was probed"
    failed = next(g for g in probe.growths if g.P == found.P)
    return (
        f"P = {found.P}: at {failed.further} the distance falls behind (ρ = {failed.rho:.2f} < {threshold})"
    )


def to_json(probe: Probe, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return `probe` as a JSON object. `setting` describes the training that was probed."""
    found = probe.verdict
    return {
        "P": found.P,
        "unclear": found.unclear,
        "final": found.final,
        "threshold": probe.plan.threshold,
        "objection": probe.objection(),
        "setting": dict(setting),
        "seeds": list(probe.plan.seeds),
        "ramp": probe.plan.ramp,
        "rows": [_row(row) for row in probe.rows],
        "growths": [_growth(g, probe.plan.rule) for g in probe.growths],
        "loss_after_equal_samples": {
            str(row.P): probe.loss_after_equal_samples(row) for row in probe.rows if row.diverged is None
        },
        "seconds": probe.seconds,
        "samples": probe.samples,
    }


def _row(row: Row) -> dict[str, Any]:
    series = {"distances": row.distances, "losses": row.losses}
    reported = {
        "P": row.P,
        "lr": row.lr,
        "D": None if math.isnan(row.D) else row.D,
        "diverged": row.diverged,
        **series,
    }
    return {**reported, "samples": row.samples, "seconds": row.seconds}


def _growth(g: Growth, rule: str) -> dict[str, Any]:
    share = g.rho / ideal(g.P, g.further, rule)
    return {"from": g.P, "to": g.further, "rho": g.rho, "low": g.low, "high": g.high, "of_ideal": share}


def plot(probe: Probe, path: Path) -> None:
    """Draw the distance D against the number of synchronizations, and against P.

    On the left there is a line for each P. On the right, next to a line in proportion to P, D grows from one
    P to the next by the growth ratio ρ. The measured D of two P would not be comparable, because their last
    synchronizations may have different numbers.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in probe.rows:
        for i, series in enumerate(row.distances):
            label = f"P = {row.P}" if i == 0 else None
            color = f"C{probe.rows.index(row)}"
            left.plot(range(1, len(series) + 1), series, ".-", color=color, alpha=0.8, label=label)
    left.axvspan(0.5, probe.plan.ramp + 0.5, color="0.92", label="learning rate climbs")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = "Distance between the groups before each synchronization"
    left.set(xlabel="synchronization", ylabel="distance D", title=title)
    left.legend()

    sound = [row for row in probe.rows if row.diverged is None]
    Ps, D = [row.P for row in sound], [sound[0].D]
    for g in probe.growths:
        D.append(D[-1] * g.rho * g.further / g.P)
    right.plot(Ps, [D[0] * P / Ps[0] for P in Ps], "--", color="0.6", label="in proportion to P")
    right.plot(Ps, D, "o-", color="C0", label=f"D, by ρ, the median of {COMPARED} values")
    chosen = probe.verdict.P
    right.plot(
        [chosen], [D[Ps.index(chosen)]], "o", ms=14, mfc="none", color="C3", label=f"answer: P = {chosen}"
    )
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(Ps, [str(P) for P in Ps])
    right.set(xlabel="groups P", ylabel="distance D", title="Does D keep up with P?")
    right.legend()
    save(figure, path)
