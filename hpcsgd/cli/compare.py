"""``hpcsgd compare``: what a training becomes with one method and with another.

A `UserError` is left to the exception hook of the job: it knows whether one rank prints it or all do.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def compare(
    job: Path,
    /,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    methods: str,
    steps: int | None = None,
    samples: int | None = None,
    target: float | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train by several methods, one after the other on the same ranks; start it as hpcsgd train.

    Samples, their order, the weights to begin with and the length are the same for all.

    :param job: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change for all, as in --training.epochs 3.
    :param methods: As "bsp, hierarchical every=8, sgp job.groups=8", or a TOML file with a table for each.
    :param steps: So many steps each, in place of the epochs of the file.
    :param samples: So many samples each, of all ranks together.
    :param target: Tell also after how many steps, seconds and bytes a test was as good as this.
    :param resume: Go on where the comparison stopped; what is complete is not run again.
    """
    # Slurm's warning may come while torch is loading, and would end this rank; the run knows its end, too.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    from hpcsgd.training.comparing import run

    budget = {"--training.steps": steps, "--training.samples": samples}
    typed = [word for flag, n in budget.items() if n is not None for word in (flag, str(n))]
    run(job, (*overrides, *typed), methods, target, resume)
