"""``hpcsgd compare``: what a training becomes with one method and with another.

A `UserError` is left to the exception hook of the job: it knows whether one rank prints it or all do.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import read_at_once
from hpcsgd.cli.words import JobKeys
from hpcsgd.config.variants import configs


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Compared:
    """What is compared, and for how long."""

    methods: str
    'As "bsp, hierarchical sync_every=8, sgp parallel.groups=8", or a TOML file with a table for each.'
    steps: int | None = None
    "So many steps each, in place of the epochs of the file."
    samples: int | None = None
    "So many samples each, of all ranks together."
    target: float | None = None
    "Tell also after how many steps, seconds and bytes a test was as good as this."

    def overrides(self) -> tuple[str, ...]:
        """How long, as keys of the job file."""
        budget = {"--training.steps": self.steps, "--training.samples": self.samples}
        return tuple(word for flag, n in budget.items() if n is not None for word in (flag, str(n)))


def compare(
    job: Path,
    /,
    *overrides: JobKeys,
    compared: Compared,
    resume: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train by several methods, one after the other on the same ranks; start it as hpcsgd train.

    Samples, their order, the weights to begin with and the length are the same for all.

    :param job: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change for all, as in --training.epochs 3.
    :param resume: Go on where the comparison stopped; what is complete is not run again.
    """
    # Slurm's warning may come while torch is loading, and would end this rank; the run knows its end, too.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    typed = (*overrides, *compared.overrides())
    read_at_once(job, typed, lambda: configs(job, typed, compared.methods))

    from hpcsgd.performance.comparing import run

    run(job, typed, compared.methods, compared.target, resume)
