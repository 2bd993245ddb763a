"""``hpcsgd probe``: how many groups a training can stand."""

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
    """Train 2, 4, 8, … virtual groups for some meetings and say how many the training stands, and why.

    Runs on as many ranks as you start, also on one.

    :param job: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, as in --method.sync_every 4.
    :param groups: The numbers of groups to try, as in 2,4,8; by default up to 32.
    :param repeats: How often to repeat each, with other shuffles and other weights to start from.
    :param ranks: For how many ranks to say the size of a group, too.
    :param offload_dir: A folder for models that wait for their turn, where they do not all fit into memory.
    :param delta: Say which delta lets a selsync job, started on all its ranks, meet how often.
    :param steps: How many steps to look at for that.
    """
    read_at_once(job, overrides, lambda: load(job, overrides))
    if delta:
        from hpcsgd.performance.probing import delta as deltas

        deltas.run(job, overrides, steps)
        return
    from hpcsgd.performance.probing.job_file import run

    run(job, overrides, groups=groups, repeats=repeats, ranks=ranks, idle=offload_dir)
