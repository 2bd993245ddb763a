"""The index of a checkpoint of torch.distributed.checkpoint is a pickle, which torch would let run code.

So it is looked at before, and must ask for nothing but what such an index is made of.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

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
    """One that knows the parts of an index only."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The allowed classes, and types of tensors; raises `UnpicklingError` for anything else."""
        a_type = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if not a_type and (module_name, global_name) not in ALLOWED:
            raise pickle.UnpicklingError(f"asks for {module_name}.{global_name}, which no checkpoint needs")
        return super().find_class(module_name, global_name)


def require_plain(folder: Path) -> None:
    """Raises `UnpicklingError`, or what else a damaged pickle may raise."""
    with (folder / INDEX).open("rb") as file:
        IndexUnpickler(file).load()
