"""Safe reading of the index of a torch.distributed.checkpoint, a pickle that torch would let run code.

Before torch reads the index, it is checked here: it may refer only to classes that such an index needs.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import torch

INDEX = ".metadata"
_OF_TORCH = "torch.distributed.checkpoint"
_PARTS = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
ALLOWED = {
    *((f"{_OF_TORCH}.metadata", name) for name in _PARTS),
    (f"{_OF_TORCH}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
}


class IndexUnpickler(pickle.Unpickler):
    """An unpickler that knows only the parts of an index."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return an allowed class, or a tensor type. Raises `UnpicklingError` for anything else."""
        if (module_name, global_name) == ("builtins", "getattr"):
            return member
        a_type = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not a_type and (module_name, global_name) not in ALLOWED:
            refuse(f"{module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def member(of: Any, name: str) -> Enum:
    """Return a member of an enumeration, without executing any other code.

    Python 3.11.0 to 3.11.3 writes such a member as a call of `getattr`.
    """
    if not (isinstance(of, type) and issubclass(of, Enum) and name in of.__members__):
        refuse("builtins.getattr")
    return of[name]


def refuse(what: str) -> NoReturn:
    raise pickle.UnpicklingError(f"asks for {what}, which no checkpoint needs")


def require_plain(folder: Path) -> None:
    """Raise `UnpicklingError`, or another exception of a damaged pickle, unless the index is plain."""
    with (folder / INDEX).open("rb") as file:
        IndexUnpickler(file).load()
