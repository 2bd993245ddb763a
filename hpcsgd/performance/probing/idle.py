"""Places for the models of virtual groups while other groups train: memory, pinned memory or disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

import h5py
import torch
from torch import Tensor, UntypedStorage

from hpcsgd.comm.streams import free_bytes, on_accelerator
from hpcsgd.errors import UserError
from hpcsgd.performance.probing.memory import free_host_bytes

Tensors = Callable[[], Iterable[Tensor]]


@runtime_checkable
class Offload(Protocol):
    """A place that keeps the tensors of idle models. A model is identified by its number `i`."""

    def put(self, i: int, tensors: Iterable[Tensor]) -> None:
        """Store the tensors of model `i`. They must not be used again before `awake` restores them."""
        ...

    @contextmanager
    def awake(self, i: int, tensors: Tensors, *, changed: bool) -> Iterator[None]:
        """Restore model `i` for the block. With `changed`, the result of `tensors` is stored afterwards."""
        ...

    def free_bytes(self, device: torch.device) -> int:
        """Return how many more bytes of models, which train on `device`, this node has room for."""
        ...


class InMemory:
    """An `Offload` that leaves idle models where they are."""

    def put(self, i: int, tensors: Iterable[Tensor]) -> None:
        pass

    @contextmanager
    def awake(self, i: int, tensors: Tensors, *, changed: bool) -> Iterator[None]:
        yield

    def free_bytes(self, device: torch.device) -> int:
        return free_bytes(device) if on_accelerator(device) else free_host_bytes()


IN_MEMORY = InMemory()


class _FreesMemory(ABC):
    """An `Offload` that frees the memory of idle models.

    The tensor objects remain, because modules and optimizers refer to them.
    """

    def __init__(self) -> None:
        self._asleep: dict[int, list[tuple[UntypedStorage, int]]] = {}

    def put(self, i: int, tensors: Iterable[Tensor]) -> None:
        storages = {s.data_ptr(): s for s in (x.untyped_storage() for x in tensors) if s.nbytes()}
        for j, storage in enumerate(storages.values()):
            self._write(f"{i}/{j}", _bytes(storage))
        self._fall_asleep(i, list(storages.values()))

    @contextmanager
    def awake(self, i: int, tensors: Tensors, *, changed: bool) -> Iterator[None]:
        sleepers = self._asleep.pop(i)
        for j, (storage, size) in enumerate(sleepers):
            storage.resize_(size)
            self._read(f"{i}/{j}", _bytes(storage))
        try:
            yield
        finally:
            if changed:
                self.put(i, tensors())
            else:
                self._fall_asleep(i, [storage for storage, _ in sleepers])

    def _fall_asleep(self, i: int, storages: list[UntypedStorage]) -> None:
        self._asleep[i] = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    @abstractmethod
    def _write(self, key: str, data: Tensor) -> None: ...

    @abstractmethod
    def _read(self, key: str, into: Tensor) -> None: ...


class PinnedMemory(_FreesMemory):
    """An `Offload` to page-locked memory of the host, for models that train on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Tensor] = {}

    def free_bytes(self, device: torch.device) -> int:
        return free_host_bytes()

    def _write(self, key: str, data: Tensor) -> None:
        kept = self._kept.get(key)
        if kept is None or len(kept) != len(data):
            self._kept[key] = kept = torch.empty(len(data), dtype=torch.uint8, device="cpu", pin_memory=True)
        kept.copy_(data)

    def _read(self, key: str, into: Tensor) -> None:
        into.copy_(self._kept[key])


class OnDisk(_FreesMemory):
    """An `Offload` to an HDF5 file in `folder`, which is removed when the process ends.

    Raises `UserError` if the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        try:
            file = tempfile.TemporaryFile(dir=folder, prefix="idle-", suffix=".h5")  # noqa: SIM115 - for life
        except OSError as error:
            raise UserError(f"{folder}: no place for idle models: {error.strerror}") from error
        self._file = h5py.File(file, "w")
        weakref.finalize(self, _close, self._file, file)

    def free_bytes(self, device: torch.device) -> int:
        return shutil.disk_usage(self._folder).free

    def _write(self, key: str, data: Tensor) -> None:
        # A copy, because torch cannot resize a storage that numpy refers to.
        copy = torch.empty(len(data), dtype=torch.uint8, device="cpu").copy_(data)
        self._file.require_dataset(key, len(data), "u1", exact=True)[:] = copy.numpy()

    def _read(self, key: str, into: Tensor) -> None:
        into.copy_(torch.from_numpy(self._file[key][:]))  # pyright: ignore[reportIndexIssue]


def _close(hdf5: h5py.File, beneath: IO[bytes]) -> None:
    hdf5.close()
    beneath.close()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
