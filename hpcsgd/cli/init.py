"""``hpcsgd init``: write a first job file."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcsgd.cli.user_errors import errors_in_one_line
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
    data_file: Path | None = None,
) -> None:
    """Write a first job file, and site.toml in a cluster; existing files are not changed.

    In a terminal it asks for each setting that no flag gives.

    :param file: The job file to write.
    :param data: digits, mnist, cifar10, cifar100, wikitext, text, movielens, or an .h5 dataset file.
    :param model: A model for these data, or your own "package.module:function"; default: a small one.
    :param ranks: How many ranks will train.
    :param groups: In how many groups.
    :param method: bsp, hierarchical, diloco, selsync or sgp.
    :param epochs: How many epochs.
    :param data_file: The dataset file, which may not exist yet; default: next to the job file.
    """
    with errors_in_one_line():
        from hpcsgd.cluster.starting import begin

        try:
            done = begin(
                file, data=data, model=model, ranks=ranks, groups=groups, method=method, epochs=epochs,
                data_file=data_file, ask=input if sys.stdin.isatty() else None,
            )  # fmt: skip
        except EOFError:
            raise UserError("no more answers: nothing is written") from None
        print("\n".join(done))
