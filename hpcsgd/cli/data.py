"""``hpcsgd data``: make dataset files to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from hpcsgd.cli.conversion import progress_of
from hpcsgd.cli.user_errors import errors_in_one_line
from hpcsgd.errors import UserError, count_text

data = App(name="data", help="Make dataset files to train on.")
OF_ALL = "hpcsgd data convert KIND [SRC] DST"
OF_TEXT = "hpcsgd data convert text FILES… DST --tokenizer bytes|FILE"
OF_NPZ = "hpcsgd data convert npz TRAIN.npz [TEST.npz] DST"
OF_IMAGES = "hpcsgd data convert images FOLDER DST [--size N]"
OF_PAIRS = "hpcsgd data convert pairs FOLDER DST --scale 2|4"
convert = App(
    name="convert",
    help="Convert distributed data, numpy arrays, text files or image folders to a dataset file.",
    usage="Usage: " + "\n       ".join([OF_ALL, OF_NPZ, OF_TEXT, OF_IMAGES, OF_PAIRS]),
)
data.command(convert)


@convert.default
def collection(kind: str, /, *paths: Path) -> None:
    """Convert a data set from the files its authors distribute to an HDF5 dataset file.

    :param kind: Which data set: cifar10, cifar100, mnist, digits, wikitext or movielens.
    :param paths: SRC, the files as downloaded (digits need none; a zip has to be unpacked), and DST, the
        dataset file to write.
    """
    with errors_in_one_line():
        if len(paths) not in (1, 2):
            raise UserError(f"data convert: {count_text(len(paths), 'path')} given, expected [SRC] DST")
        from hpcsgd.data import convert

        *source, target = paths
        print(convert(kind, source[0] if source else None, target))


@convert.command(usage=f"Usage: {OF_NPZ}")
def npz(*paths: Path) -> None:
    """Convert your own arrays, written by numpy.savez(FILE, x=samples, y=classes), to a dataset file.

    :param paths: The file to train on; the file to test on, without which every tenth sample of each class is
        held out; and DST, the dataset file to write.
    """
    with errors_in_one_line():
        if len(paths) < 2:
            raise UserError(
                f"data convert npz: {count_text(len(paths), 'path')} given, expected TRAIN.npz [TEST.npz] DST"
            )
        from hpcsgd.data import convert_npz

        *sources, target = paths
        print(convert_npz(sources, target))


@convert.command(usage=f"Usage: {OF_TEXT}")
def text(
    *paths: Path,
    tokenizer: str,
    test: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    between: str | None = None,
    end: str | None = None,
) -> None:
    """Convert files of text to a file of tokens, in one pass, whatever their size.

    :param paths: The files, or folders of files, compressed or not: each is a document, or a .jsonl with a
        document as "text" in each line; and DST, the dataset file to write.
    :param tokenizer: bytes, or a tokenizer.json of the library `tokenizers`.
    :param test: A file or folder to test on; may be given several times. Without, every hundredth document is
        held out.
    :param between: The line that separates documents within a file, such as "<|endoftext|>", or "" for empty
        lines.
    :param end: The token that ends a document in FILE, if it has none of its usual names.
    """
    with errors_in_one_line():
        if len(paths) < 2:
            raise UserError(f"data convert text: {count_text(len(paths), 'path')} given, expected FILES… DST")
        from hpcsgd.data import convert_text

        *sources, target = paths
        print(convert_text(sources, target, tokenizer, test=test, between=between, end=end))


@convert.command(usage=f"Usage: {OF_IMAGES}")
def images(folder: Path, dst: Path, /, *, size: int = 224) -> None:
    """Convert a folder of JPEG or PNG images to a dataset file; continue an interrupted conversion.

    :param folder: With train/ and val/ (or valid/, or test/); in each a folder per class, as in ImageNet.
    :param dst: The dataset file to write; a folder next to it has the images.
    :param size: Side of a sample, in pixels; a job file may use another.
    """
    with errors_in_one_line():
        from hpcsgd.data import convert_images

        print(convert_images(folder, dst, size, progress_of()))


@convert.command(usage=f"Usage: {OF_PAIRS}")
def pairs(folder: Path, dst: Path, /, *, scale: int) -> None:
    """Convert a folder of PNG images to pairs for super-resolution: each image, and the same reduced.

    The images are reduced by bicubic interpolation.

    :param folder: With train/ and val/ (or valid/, or test/), and the images in each.
    :param dst: The dataset file to write.
    :param scale: The factor of the reduction: 2 or 4.
    """
    with errors_in_one_line():
        from hpcsgd.data import convert_pairs

        print(convert_pairs(folder, dst, scale, progress_of()))
