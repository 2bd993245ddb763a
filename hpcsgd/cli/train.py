"""``hpcsgd train``: train according to a job file.

The job's exception hook handles a `UserError`, because the hook knows whether one rank or all print it.
"""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import read_at_once
from hpcsgd.cli.words import JobKeys
from hpcsgd.config.at_line import at_line
from hpcsgd.config.schema import load


def train(
    job: Path,
    /,
    *overrides: JobKeys,
    resume: Annotated[bool, Parameter(negative="")] = False,
    probe: Path | None = None,
    trace: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Train according to a job file; start it with mpiexec or srun for several ranks.

    :param job: The TOML file.
    :param overrides: Keys of the file to change, such as --training.epochs 3 --method.sync_every 4.
    :param resume: Continue from the last checkpoint in the run folder.
    :param probe: A probe.json, which gives the number of groups.
    :param trace: Write what every rank does in some steps to trace.json.gz in the run folder; the same as
    --run.trace_steps auto.
    """
    # Slurm's warning signal may come while torch loads, and would end this rank. The run does not need the
    # signal, because it knows the end of its job.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    typed = (*(["--run.trace_steps", "auto"] if trace else []), *overrides)
    read = cache(lambda: load(job, typed))
    read_at_once(job, typed, read)

    from hpcsgd.train import run

    by_probe = [] if probe is None else ["--parallel.groups", "--parallel.group_size"]
    with at_line(job, (*typed, *by_probe)):
        run(job, read, resume, probe)
