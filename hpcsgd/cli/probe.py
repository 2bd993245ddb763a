"""``hpcsgd probe``: how many groups a training tolerates."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import read_at_once
from hpcsgd.cli.words import JobKeys
from hpcsgd.config.schema import load


def probe(
    job: Path,
    /,
    *overrides: JobKeys,
    groups: str | None = None,
    repeats: int = 1,
    ranks: int | None = None,
    offload_dir: Path | None = None,
    delta: Annotated[bool, Parameter(negative="")] = False,
    steps: int = 200,
) -> None:
    """Train 2, 4, 8, … virtual groups for a while; report how many groups the training tolerates, and why.

    The probe runs on any number of ranks, even on one.

    :param job: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, such as --method.sync_every 4.
    :param groups: The numbers of groups to try, such as 2,4,8; default: up to 32.
    :param repeats: Trainings of each number of groups, with different initial weights and orders of samples.
    :param ranks: Also report the group size for this number of ranks.
    :param offload_dir: A folder for idle models, if they do not all fit into memory.
    :param delta: Report how often a selsync job, started on all its ranks, would average for each delta.
    :param steps: The number of steps to observe for --delta.
    """
    read = cache(lambda: load(job, overrides))
    read_at_once(job, overrides, read)
    if delta:
        from hpcsgd.performance.probing import delta as deltas

        deltas.run(job, read, steps)
        return
    from hpcsgd.performance.probing.job_file import run

    run(job, read, groups=groups, repeats=repeats, ranks=ranks, idle=offload_dir)
