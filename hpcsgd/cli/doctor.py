"""``hpcsgd doctor``: the first thing to run on a new cluster."""

from __future__ import annotations

from pathlib import Path


def doctor(*, groups: int | None = None, group_size: int | None = None, store: Path | None = None) -> None:
    """Look at the ranks, their nodes and cores, and try out the communication.

    Start it as the training: with mpiexec, with srun, or alone. Exit code 1 if something is wrong.

    :param groups: Show and judge the ranks as this many groups.
    :param group_size: Show and judge the ranks as groups of this many.
    :param store: A store that every rank has to be able to read.
    """
    from hpcsgd.cluster.doctor import run

    run(groups, group_size, store)
