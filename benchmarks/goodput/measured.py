"""Measure a contestant without and with failures."""

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
"""The assumed seconds of a checkpoint, from which its interval follows. Here it has a few kilobytes."""
CALM_STEPS = 10
"""Steps between checkpoints in runs without failures, and of contestants not in WITH_INTERVAL."""
WITH_INTERVAL = (SYNC, DDP)
"""Contestants that use Young's interval. The others continue from surviving groups instead."""


def measured(setting: Setting, who: str, seed: int, tell: Callable[[str], object]) -> list[Row]:
    """Return a row for each mean time between failures.

    Raise `NotHere` if the contestant cannot take part.
    """
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
