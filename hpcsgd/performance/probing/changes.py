"""Measure how much the groups' gradients change per step, to choose SelSync's δ.

Δ(g) is the relative change of a group's smoothed squared gradient norm. SelSync synchronizes after a step if
the largest Δ(g) of any group is at least δ (algorithm 1, lines 11 to 15). The other steps stay local, and
LSSR(δ) is their share (eq. 4). In the probe all steps synchronize (δ = 0, as in the paper's figure 5), and
for these steps LSSR(δ) is exact. With fewer synchronizations the models drift, and gradients change
differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcsgd.files.pictures import save

LSSRS = (0.5, 0.75, 0.9, 0.95, 0.99)
"""The local-step ratios (LSSR) for which the table shows δ, one per row."""
HEAD = f"{'LSSR':>5}  {'δ':>9}  {'syncs':>8}  {'sends 1/':>8}"


@dataclass(frozen=True)
class Changes:
    """The changes Δ(g), one row per step except the first, and one column per group."""

    deltas: NDArray[np.float64]

    @property
    def largest(self) -> NDArray[np.float64]:
        """The largest Δ(g) of any group, for each step."""
        return self.deltas.max(axis=1)

    def lssr(self, delta: float) -> float:
        """Return the LSSR of δ = `delta`: the share of measured steps that would have stayed local."""
        return float((self.largest < delta).mean())

    def delta(self, lssr: float) -> float:
        """Return the smallest δ with which at least the share `lssr` of the measured steps stays local."""
        ordered = np.sort(self.largest)
        return float(np.nextafter(ordered[max(int(np.ceil(lssr * len(ordered))) - 1, 0)], np.inf))


def table(changes: Changes) -> list[str]:
    """Return the lines of the table: its head, and a row for each of `LSSRS`."""
    rows = [HEAD]
    for wanted in LSSRS:
        delta = changes.delta(wanted)
        lssr = changes.lssr(delta)
        syncs = round((1 - lssr) * len(changes.largest))
        less = f"{1 / (1 - lssr):>8.1f}" if syncs else f"{'∞':>8}"
        rows.append(f"{lssr:>5.2f}  {delta:>9.4g}  {syncs:>8}  {less}")
    return rows


def to_json(changes: Changes, setting: dict[str, Any]) -> dict[str, Any]:
    """Return `changes` as a JSON object. `setting` describes the training that was measured."""
    rows = [{"delta": (d := changes.delta(wanted)), "lssr": changes.lssr(d)} for wanted in LSSRS]
    return {"setting": setting, "rows": rows, "deltas": changes.deltas.tolist()}


def plot(changes: Changes, path: Path) -> None:
    """Draw Δ(g) against steps, and LSSR against δ, into the file `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(2, len(changes.deltas) + 2)
    seen = changes.deltas > 0
    for g, (delta, there) in enumerate(zip(changes.deltas.T, seen.T, strict=True)):
        left.plot(
            steps[there], delta[there], ".", ms=2, color="C0", alpha=0.4, label=None if g else "each group"
        )
    left.plot(steps, changes.largest, "-", lw=0.8, color="C3", label="the largest")
    left.set_yscale("log")
    left.set(xlabel="step", ylabel="Δ(g)", title="How much the groups' gradients changed")
    left.legend()

    ordered = np.sort(changes.largest)
    right.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color="C0")
    _mark(right, changes)
    right.set_xscale("log")
    right.set(xlabel="δ", ylabel="LSSR", ylim=(0, 1.02), title="Steps that stay local with this δ")
    save(figure, path)


def _mark(axes: Any, changes: Changes) -> None:
    for wanted in LSSRS:
        delta = changes.delta(wanted)
        axes.plot([delta], [changes.lssr(delta)], "o", color="C3", ms=5)
        axes.annotate(
            f"δ = {delta:.3g} ", (delta, changes.lssr(delta)), ha="right", va="center", fontsize="small"
        )


def changes_of(rows: Sequence[Sequence[float]]) -> Changes:
    """Return the changes from `rows`, one per step. Row 1 is left out, because step 1 has no Δ."""
    return Changes(np.array(rows[1:], dtype=np.float64))
