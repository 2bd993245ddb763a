"""A check of the index of a checkpoint of torch.distributed.checkpoint, before torch reads it.

The index is a pickle, and torch would let it run any code. The check allows it to refer only to the classes
that an index needs.
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
    """An unpickler that makes only objects of the classes that an index needs."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return an allowed class, or a tensor type. Raises `UnpicklingError` for anything else."""
        if (module_name, global_name) == ("builtins", "getattr"):
            return member
        a_type = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not a_type and (module_name, global_name) not in ALLOWED:
            refuse(f"{module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def member(of: Any, name: str) -> Enum:
    """Return the member `name` of the enumeration `of`; refuse anything else.

    Python 3.11.0 to 3.11.3 writes such a member as a call of `getattr`, which this function replaces, because
    `getattr` could be used to run code.
    """
    if not (isinstance(of, type) and issubclass(of, Enum) and name in of.__members__):
        refuse("builtins.getattr")
    return of[name]


def refuse(what: str) -> NoReturn:
    raise pickle.UnpicklingError(f"asks for {what}, which no checkpoint needs")


def require_plain(folder: Path) -> None:
    """Raise `UnpicklingError` if the index in `folder` refers to other classes than an index needs.

    A damaged index may cause other exceptions.
    """
    with (folder / INDEX).open("rb") as file:
        IndexUnpickler(file).load()
