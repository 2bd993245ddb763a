"""``hpcsgd doctor``: the first thing to run on a new cluster."""

from __future__ import annotations

from pathlib import Path


def doctor(
    *, groups: int | None = None, group_size: int | None = None, data_file: Path | None = None
) -> None:
    """Check the ranks, their nodes and cores, and test the communication.

    Start it like the training: with mpiexec, with srun, or alone. Exit code 1 if something is wrong.

    :param groups: The number of groups to show and check.
    :param group_size: The number of ranks in each group, in place of groups.
    :param data_file: A dataset file that every rank has to be able to read.
    """
    from hpcsgd.cluster.doctor import run

    run(groups, group_size, data_file)
