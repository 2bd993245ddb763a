"""Job files, trainings on virtual ranks, and the accuracy of the averaged model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import Config, load
from hpcsgd.data import ImageDataset
from hpcsgd.performance.probing.replicas import VirtualGroups
from hpcsgd.train.process import keep_freed_memory

Result = TypeVar("Result")
JOBS = Path(__file__).parents[1] / "jobs"
GROUPS = (1, 2, 4, 8, 16, 32)
BATCH = 500


def job(name: str, data: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the job file `name` with its dataset file in the folder `data`."""
    store = data / f"{name.partition('_')[0]}.h5"
    return load(JOBS / f"{name}.toml", ["--data.path", str(store), *overrides])


def alone(work: Callable[[Communicator], Result]) -> Result:
    """Run `work` on one rank, which hosts all groups, on one core."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return threads.run(1, work, timeout=24 * 3600)[0]


def accuracy(groups: VirtualGroups, test: ImageDataset, device: torch.device) -> float:
    """Return the share of the test samples that the averaged model classifies correctly."""
    right = 0
    with groups.averaged() as model:
        for rows in torch.arange(len(test)).split(BATCH):
            x, y = test.collate(test.__getitems__(rows.tolist()))
            right += int((model(x.to(device)).argmax(1).cpu() == y).sum())
    return right / len(test)


def where(device: torch.device) -> dict[str, Any]:
    """Return the accelerator, for the record of the machine."""
    return {"accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None}
