"""The function that opens a split of a dataset file of any form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcsgd.data.arrays import Arrays
from hpcsgd.data.image_dataset import ImageDataset
from hpcsgd.data.image_files import ImageFiles
from hpcsgd.data.layout import Form, form_of
from hpcsgd.data.pairs import Pairs
from hpcsgd.data.ratings import Ratings
from hpcsgd.data.split import Split
from hpcsgd.data.windows import Windows
from hpcsgd.named import call_named

SPLITS: Mapping[Form, type[ImageDataset | Arrays | ImageFiles | Pairs | Windows | Ratings]] = {
    "images": ImageDataset,
    "arrays": Arrays,
    "image files": ImageFiles,
    "pairs": Pairs,
    "tokens": Windows,
    "ratings": Ratings,
}


def open_split(path: Path, split: str, arguments: Mapping[str, Any] | None = None) -> Split:
    """Return the split of the dataset file at `path`, as an object of the class for its form.

    The class is called with `arguments`. Raises `UserError` if the class does not accept them, and the errors
    of the class.
    """
    form = form_of(path)
    return call_named(form, SPLITS[form], {form: SPLITS[form]}, arguments or {}, path, split)
