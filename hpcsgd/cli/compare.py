"""``hpcsgd compare``: one training by several methods.

The job's exception hook handles a `UserError`, because the hook knows whether one rank or all print it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import read_at_once
from hpcsgd.cli.words import JobKeys
from hpcsgd.config.variants import configs


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Compared:
    """The options of a comparison: which methods to compare, and for how long."""

    methods: str
    'Such as "bsp, hierarchical sync_every=8, sgp parallel.groups=8", or a TOML file with a table for each.'
    steps: int | None = None
    "Steps of each training, in place of the epochs of the file."
    samples: int | None = None
    "Samples of each training, over all ranks together."
    target: float | None = None
    "Also report after how many steps, seconds and bytes a test was as good as this."

    def overrides(self) -> tuple[str, ...]:
        """Return the options `steps` and `samples` as overrides of the job file's keys."""
        budget = {"--training.steps": self.steps, "--training.samples": self.samples}
        return tuple(word for flag, n in budget.items() if n is not None for word in (flag, str(n)))


def compare(
    job: Path,
    /,
    *overrides: JobKeys,
    compared: Compared,
    resume: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train by several methods, one after the other on the same ranks; start it like hpcsgd train.

    Samples, their order, the initial weights and the length are the same for all.

    :param job: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change for all, such as --training.epochs 3.
    :param resume: Continue where the comparison stopped; complete trainings are not run again.
    """
    # Slurm's warning signal may come while torch loads, and would end this rank. The run does not need the
    # signal, because it knows the end of its job.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    typed = (*overrides, *compared.overrides())
    read = cache(lambda: configs(job, typed, compared.methods))
    read_at_once(job, typed, read)

    from hpcsgd.performance.comparing import run

    run(job, read, compared.target, resume)
