"""``hpcsgd init``: a first job file."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcsgd.cli.user_errors import told_in_one_line
from hpcsgd.errors import UserError


def init(
    file: Path = Path("job.toml"),
    /,
    *,
    data: str | None = None,
    model: str | None = None,
    ranks: int | None = None,
    groups: int | None = None,
    method: str | None = None,
    epochs: int | None = None,
    store: Path | None = None,
) -> None:
    """Write a job file to begin with, and site.toml in a cluster; what is there already stays as it is.

    In a terminal it asks for what no flag says.

    :param file: The job file to write.
    :param data: digits, mnist, cifar10, cifar100, wikitext, text, movielens, or the .h5 file of a store.
    :param model: A model for these data, or your own "package.module:function"; by default a small one.
    :param ranks: How many ranks will train.
    :param groups: In how many groups.
    :param method: bsp, hierarchical, diloco, selsync or sgp.
    :param epochs: How long.
    :param store: Where the store of the data is, or is going to be; by default beside the job file.
    """
    with told_in_one_line():
        from hpcsgd.cluster.starting import begin

        try:
            done = begin(
                file, data=data, model=model, ranks=ranks, groups=groups, method=method, epochs=epochs,
                store=store, ask=input if sys.stdin.isatty() else None,
            )  # fmt: skip
        except EOFError:
            raise UserError("no more answers: nothing is written") from None
        print("\n".join(done))
