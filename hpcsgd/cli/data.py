"""``hpcsgd data``: make stores to train on."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from hpcsgd.cli.user_errors import told_in_one_line
from hpcsgd.errors import UserError

data = App(name="data", help="Make stores to train on.")


@data.command(usage="Usage: hpcsgd data convert KIND [SRC] DST")
def convert(kind: str, /, *paths: Path) -> None:
    """Convert a data set from the files its authors distribute to an HDF5 store.

    :param kind: Which data set: cifar10, cifar100, mnist, digits, wikitext or movielens.
    :param paths: SRC, the files as downloaded (digits need none; a zip has to be unpacked), and DST, the
        store to write.
    """
    with told_in_one_line():
        if len(paths) not in (1, 2):
            raise UserError(f"data convert: {len(paths)} paths given, expected [SRC] DST")
        from hpcsgd.data import convert

        *source, target = paths
        print(convert(kind, source[0] if source else None, target))
