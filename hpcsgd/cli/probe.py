"""``hpcsgd probe``: how many groups a training tolerates."""

from __future__ import annotations

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
    """Train 2, 4, 8, … virtual groups for a while; report how many the training tolerates, and why.

    Runs on as many ranks as you start, even on one.

    :param job: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, such as --method.sync_every 4.
    :param groups: The numbers of groups to try, such as 2,4,8; default: up to 32.
    :param repeats: How often to repeat each, with another order of samples and other initial weights.
    :param ranks: The number of ranks for which to report the group size, too.
    :param offload_dir: A folder for idle models, if they do not all fit into memory.
    :param delta: Report how often a selsync job, started on all its ranks, would average for each delta.
    :param steps: The number of steps to observe for that.
    """
    read_at_once(job, overrides, lambda: load(job, overrides))
    if delta:
        from hpcsgd.performance.probing import delta as deltas

        deltas.run(job, overrides, steps)
        return
    from hpcsgd.performance.probing.job_file import run

    run(job, overrides, groups=groups, repeats=repeats, ranks=ranks, idle=offload_dir)
