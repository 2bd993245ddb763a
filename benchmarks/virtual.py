"""What the benchmarks of the probe share: job files, a process a training, the averaged model's accuracy."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import h5py
import torch

from hpcsgd.config.schema import Config, load
from hpcsgd.data import Store
from hpcsgd.training.process import keep_freed_memory
from hpcsgd.transport import Transport, threads
from hpcsgd.tuning.replicas import VirtualGroups

Result = TypeVar("Result")
JOBS = Path(__file__).with_name("jobs")
GROUPS = (1, 2, 4, 8, 16, 32)
BATCH = 500


def job(name: str, data: Path, overrides: Sequence[str] = ()) -> Config:
    """The job file `name`, its store taken from the folder `data`."""
    store = data / f"{name.partition('_')[0]}.h5"
    return load(JOBS / f"{name}.toml", ["--data.store", str(store), *overrides])


def first_images(source: Path, count: int, target: Path) -> Path:
    """A store with only the first `count` images to train on, for machines on which all take too long."""
    with h5py.File(source) as whole, h5py.File(target, "w") as part:
        part.attrs.update(whole.attrs)
        for name in ("train/x", "train/y", "test/x", "test/y"):
            old: Any = whole[name]
            rows = count if name.startswith("train") else len(old)
            images = name.endswith("x")
            chunks = (1, *old.shape[1:]) if images else None
            part.create_dataset(name, data=old[:rows], chunks=chunks, fletcher32=images)
    return target


def alone(work: Callable[[Transport], Result]) -> Result:
    """On one rank, which hosts all groups, on one core."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return threads.run(1, work, timeout=24 * 3600)[0]


def in_processes(processes: int, tasks: Sequence[partial[Result]]) -> Iterator[Result]:
    """What the tasks return, as they end; the last are begun first, being the longest."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        for done in as_completed([pool.submit(task) for task in reversed(tasks)]):
            yield done.result()


def accuracy(groups: VirtualGroups, test: Store, device: torch.device) -> float:
    """The share of the test samples that the averaged model gets right."""
    right = 0
    with groups.averaged() as model:
        for rows in torch.arange(len(test)).split(BATCH):
            x, y = test.collate(test.__getitems__(rows.tolist()))
            right += int((model(x.to(device)).argmax(1).cpu() == y).sum())
    return right / len(test)


def where(device: torch.device) -> dict[str, Any]:
    """The accelerator, for the record of the machine."""
    return {"accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None}
