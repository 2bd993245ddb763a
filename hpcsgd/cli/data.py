"""``hpcsgd data``: make stores to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from hpcsgd.cli.user_errors import told_in_one_line
from hpcsgd.errors import UserError

data = App(name="data", help="Make stores to train on.")
OF_TEXT = "hpcsgd data convert text FILES… DST --tokenizer bytes|FILE"
convert = App(
    name="convert",
    help="Convert a data set from the files its authors distribute, or files of text, to an HDF5 store.",
    usage=f"Usage: hpcsgd data convert KIND [SRC] DST\n       {OF_TEXT}",
)
data.command(convert)


@convert.default
def collection(kind: str, /, *paths: Path) -> None:
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


@convert.command(usage=f"Usage: {OF_TEXT}")
def text(
    *paths: Path,
    tokenizer: str,
    test: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    between: str | None = None,
    end: str | None = None,
) -> None:
    """Convert files of text to a store of tokens, in one pass, however large they are.

    :param paths: The files, or folders of files, compressed or not: each a document, or a .jsonl with one as
        "text" in each line; and DST, the store to write.
    :param tokenizer: bytes, or a tokenizer.json of the library `tokenizers`.
    :param test: A file or folder to test on; may be given several times. Without, every hundredth document is
        held out.
    :param between: The line that parts documents within a file, such as "<|endoftext|>", or "" for empty
        lines.
    :param end: What FILE calls the token that ends a document, where that is not told by its usual names.
    """
    with told_in_one_line():
        if len(paths) < 2:
            raise UserError(f"data convert text: {len(paths)} paths given, expected FILES… DST")
        from hpcsgd.data import convert_text

        *sources, target = paths
        print(convert_text(sources, target, tokenizer, test=test, between=between, end=end))
