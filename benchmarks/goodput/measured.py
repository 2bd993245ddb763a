"""A contestant, undisturbed and with failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from goodput.contestants import DDP, SYNC
from goodput.course import course
from goodput.killer import failures
from goodput.settings import Setting

Row = dict[str, Any]
CHECKPOINT = 0.03
"""Seconds that a checkpoint is taken to cost where its interval is chosen: it has a few kilobytes here."""
CALM_STEPS = 10
"""Between checkpoints where nobody dies: as often as when somebody does."""
WITH_INTERVAL = (SYNC, DDP)
"""For whom Young's interval matters: groups go on from each other."""


def measured(setting: Setting, who: str, seed: int, tell: Callable[[str], object]) -> list[Row]:
    """A row for each mean time between failures. Raises `NotHere`."""
    calm = course(who, setting, setting.calm, CALM_STEPS)
    ideal = setting.P * setting.batch / setting.seconds
    tell(f"{who}: {calm.rate:.0f} samples/s undisturbed, {calm.rate / ideal:.1%} of computing alone")
    rows: list[Row] = []
    for mtbf in setting.mtbfs:
        plan = failures(setting, mtbf, setting.window, seed)
        every = setting.steps_between(CHECKPOINT, mtbf) if who in WITH_INTERVAL else CALM_STEPS
        went = course(who, setting, setting.window, every, plan)
        rows.append(
            {
                "part": "measured",
                "who": who,
                "mtbf_s": mtbf,
                "seconds": went.seconds,
                "failures": went.failures,
                "kinds": [failure.kind for failure in plan],
                "seen_mtbf_s": went.seconds / went.failures if went.failures else None,
                "undisturbed_samples_per_s": calm.rate,
                "samples": went.samples,
                "goodput": went.samples / (went.seconds * calm.rate),
                "restart_s": went.restart,
                "checkpoint_every_steps": every,
                "setting": asdict(setting),
            }
        )
        tell(f"{who}: a failure every {mtbf:g} s: {went.failures} of them, goodput {rows[-1]['goodput']:.1%}")
    return rows
