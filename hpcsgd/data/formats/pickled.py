"""Safe unpickling of the dictionaries of arrays in which CIFAR is distributed."""

from __future__ import annotations

import io
import pickle
from typing import Any

from hpcsgd.data.formats.streams import InputStream

# A pickled array refers to three names of NumPy, one of which NumPy 2 has moved. Pickled bytes refer to a
# name of Python.
ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that makes only NumPy arrays and plain containers, so that it runs no other code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return an allowed constructor of arrays. Raises `UnpicklingError` for anything else."""
        if (module_name, global_name) not in ALLOWED:
            raise pickle.UnpicklingError(f"asks for {module_name}.{global_name}, which no data file needs")
        return super().find_class(module_name, global_name)


def load_dictionary(stream: InputStream) -> dict[str, Any]:
    """Return the pickled dictionary in `stream`, with text keys. Raises `UserError` with file and byte."""
    content = io.BytesIO(stream.read())
    try:
        loaded = ArrayUnpickler(content, encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise stream.error(f"not a pickle that can be read here ({error})", content.tell()) from error
    if not isinstance(loaded, dict):
        raise stream.error(f"a pickled dictionary was expected, not {type(loaded).__name__}", 0)
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in loaded.items()}
