"""Tasks by the kind of data, in a file each. A task has a loss and figures of merit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcsgd.data import Arrays, ImageDataset, ImageFiles, Pairs, Ratings, Split, Windows
from hpcsgd.train.tasks.classification import Classification
from hpcsgd.train.tasks.language import Language
from hpcsgd.train.tasks.recommendation import Recommendation
from hpcsgd.train.tasks.super_resolution import SuperResolution
from hpcsgd.train.tasks.task import Result, Task

TASKS: Mapping[type[Split], Callable[[Any], Task]] = {
    ImageDataset: Classification,
    Arrays: Classification,
    ImageFiles: Classification,
    Pairs: SuperResolution,
    Windows: Language,
    Ratings: Recommendation,
}


def task_of(data: Split) -> Task:
    """Return the task for data of the class of `data`."""
    return TASKS[type(data)](data)


__all__ = [
    "TASKS",
    "Classification",
    "Language",
    "Recommendation",
    "Result",
    "SuperResolution",
    "Task",
    "task_of",
]
