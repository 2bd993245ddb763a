"""Training of P virtual groups: the quality of the mean model, and the distance D of the groups."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import torch
from PIL import Image

from harness import in_processes
from harness.stores import first_images
from hpcsgd.comm import Communicator
from hpcsgd.config.schema import Config, load
from hpcsgd.data import convert, convert_pairs, open_split
from hpcsgd.performance.probing.replicas import DivergedError, VirtualGroups
from hpcsgd.performance.probing.virtual import virtual_groups
from hpcsgd.train.tasks import task_of
from papers.artifact import Place, Row
from probe.virtual import GROUPS, alone, job
from probe_distances import LONG, Task

CPU = torch.device("cpu")
PROCESSES = len(os.sched_getaffinity(0))
BATCH = 250
TESTED = 2000
"""The largest number of images on which a mean model is tested."""
POINTS = 60
"""The largest number of distances that a row keeps."""


def at_fixed_rate(place: Place, intervals: Sequence[int], num_syncs: int) -> list[Row]:
    """Return rows with D at the first `num_syncs` synchronizations, by interval and P.

    The model is ResNet-8 on CIFAR-10. There is no warm-up, and the learning rate is the same for all P.
    """
    fixed = [
        "--method.name",
        "hierarchical",
        "--lr_schedule.scaling",
        "none",
        "--lr_schedule.warmup_epochs",
        "0",
    ]
    with stores(place) as (name, data):
        tasks = []
        for every in intervals[:2] if place.quick else intervals:
            config = job(name, data, [*fixed, "--method.sync_every", str(every)])
            tasks += [
                partial(_every, every, Task(config, P, LONG, 1, num_syncs, CPU))
                for P in (GROUPS[1:3] if place.quick else GROUPS[1:])
            ]
        return sorted(in_processes(PROCESSES, tasks), key=lambda row: (row["every"], row["P"]))


def _every(every: int, task: Task) -> Row:
    return {"every": every, **task.measured()}


@contextmanager
def stores(place: Place) -> Iterator[tuple[str, Path]]:
    """Yield the name of a job file in benchmarks/jobs, and the folder of its dataset.

    A quick run trains on the digits.
    """
    if not place.quick:
        yield "cifar10_resnet8", place.data
        return
    with tempfile.TemporaryDirectory() as folder:
        convert("digits", None, Path(folder) / "digits.h5")
        yield "digits_cnn", Path(folder)


def classified(place: Place, images: int, epochs: int) -> list[Row]:
    """Return rows with loss, accuracy and D for P = 1 … 32.

    The model is ResNet-8 on the first `images` images. Groups synchronize every 8 steps, and the learning
    rate is multiplied by P.
    """
    with tempfile.TemporaryDirectory() as folder, stores(place) as (name, data):
        groups = GROUPS[:2] if place.quick else GROUPS
        epochs = 2 if place.quick else epochs
        words = [
            "--method.name",
            "hierarchical",
            "--method.sync_every",
            "8",
            "--training.epochs",
            str(epochs),
        ]
        config = job(
            name,
            data,
            [*words, "--lr_schedule.warmup_epochs", "1", "--lr_schedule.arguments.T_max", str(epochs)],
        )
        if not place.quick:
            part = first_images(config.data.path, images, Path(folder) / "part.h5")
            config = replace(config, data=replace(config.data, path=part))
        return sorted(in_processes(PROCESSES, _of_all(config, groups)), key=lambda row: row["P"])


def sharpened(place: Place, images: int, epochs: int) -> list[Row]:
    """Return rows with loss, PSNR and D for P = 1 … 16.

    The model is a small EDSR that doubles the size of CIFAR-10 images. Groups synchronize every 4 steps. The
    optimizer is Adam, whose learning rate is multiplied by √P.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = _pairs(place, 64 if place.quick else images, Path(folder))
        job_file = Path(folder) / "edsr.toml"
        job_file.write_text(SHARPEN.format(store=store, epochs=1 if place.quick else epochs))
        groups = GROUPS[:2] if place.quick else GROUPS[:5]
        tasks = _of_all(load(job_file), groups)
        return sorted(in_processes(PROCESSES, tasks), key=lambda row: row["P"])


SHARPEN = """
[data]
path = "{store}"
group_batch_size = 16
arguments = {{ patch = 16 }}
[model]
name = "edsr"
arguments = {{ scale = 2, blocks = 4, width = 16 }}
[optimizer]
name = "Adam"
lr = 0.001
[lr_schedule]
scaling = "root"
warmup_epochs = 1
[method]
name = "hierarchical"
sync_every = 4
[training]
epochs = {epochs}
"""


def _pairs(place: Place, count: int, folder: Path) -> Path:
    """Write images of CIFAR-10 as PNG files, convert them to pairs, and return the path of the pairs.

    There are `count` images for training and half as many for testing.
    """
    with h5py.File(place.data / "cifar10.h5") as whole:
        for split, name, rows in (("train", "train", count), ("test", "val", count // 2)):
            (folder / "png" / name).mkdir(parents=True)
            pixels: Any = whole[f"{split}/x"]
            for i, image in enumerate(pixels[:rows]):
                Image.fromarray(image.transpose(1, 2, 0)).save(folder / "png" / name / f"{i:05}.png")
    convert_pairs(folder / "png", folder / "pairs.h5", 2)
    return folder / "pairs.h5"


def _of_all(config: Config, groups: Sequence[int]) -> list[partial[Row]]:
    return [partial(trained, config, P) for P in groups]


def trained(config: Config, P: int) -> Row:
    """Run one whole training with P groups, and return its row.

    The row has D at the synchronizations. For each epoch it has the mean loss and the test result of the mean
    model.
    """
    row: Row = {"P": P, "loss": [], "tested": [], "distances": [], "diverged": None}
    work = partial(_train, config, P, row)
    alone(work)
    row["distances"] = [round(D, 5) for D in row["distances"][:: -(-len(row["distances"]) // POINTS) or 1]]
    print(f"P = {P}: {row['tested'][-1:]}", flush=True)
    return row


def _train(config: Config, P: int, row: Row, world: Communicator) -> None:
    groups = virtual_groups(config, P, 1, world)
    every = config.method.arguments["sync_every"]
    assert config.training.epochs is not None
    train = open_split(config.data.path, "train", config.data.arguments)
    steps, done = max(1, len(train) // P // config.data.group_batch_size), 0
    try:
        for _ in range(config.training.epochs):
            total = 0.0
            for _ in range(steps):
                total += groups.train(1)
                done += 1
                if done % every == 0:
                    row["distances"].append(groups.synchronize())
            row["loss"].append(round(total / steps, 4))
            row["tested"].append(round(_tested(config, groups), 4))
    except DivergedError as error:
        row["diverged"] = str(error)


def _tested(config: Config, groups: VirtualGroups) -> float:
    """Return the task's first figure, such as accuracy or PSNR, of the mean model on test samples."""
    test = open_split(config.data.path, "test", config.data.arguments)
    task = task_of(test)
    count = min(TESTED, len(test))
    with groups.averaged() as model:
        tallies = [
            task.tally(model(x), y)
            for rows in torch.arange(count).split(BATCH)
            for x, y in [test.collate(test.__getitems__(rows.tolist()))]
        ]
    return next(iter(task.result(torch.stack(tallies).sum(0)).figures.values()))


def flat(row: Row) -> float:
    """Return the median of D over the second half of the training, in which D has settled."""
    later = row["distances"][len(row["distances"]) // 2 :]
    return median(later) if later else float("nan")
