"""``hpcsgd measure``: the speed of messages and computing on this machine."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import read_at_once
from hpcsgd.cli.words import JobKeys
from hpcsgd.config.schema import load


def measure(
    job: Path | None = None,
    /,
    *overrides: JobKeys,
    out: Path = Path("machine.toml"),
    quick: Annotated[bool, Parameter(negative="")] = False,
    max_bytes: int | None = None,
    seconds: float | None = None,
) -> None:
    """Time all operations on all links that a job on these ranks could use, in under five minutes.

    Start it like the training: with mpiexec or srun, on as many hosts and ranks. It writes a machine file,
    from which the time of other jobs can be predicted, and a picture next to it.

    :param job: A job file. Its model, optimizer and batches are timed, too.
    :param overrides: Keys of the file to change, such as --data.group_batch_size 64.
    :param out: The machine file.
    :param quick: Measure for under a minute, with smaller messages and fewer repeats.
    :param max_bytes: The largest messages; 64 MB, and 16 MB with --quick.
    :param seconds: About how long to measure; 220, and 33 with --quick.
    """
    read = None
    if job is not None:
        read = cache(partial(load, job, overrides))
        read_at_once(job, overrides, read)

    from hpcsgd.performance.measuring import run

    run(job, read, out=out, quick=quick, max_bytes=max_bytes, seconds=seconds)
