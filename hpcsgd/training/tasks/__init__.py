"""What is to be learned, by the kind of data: each a loss, and how good a model is. One task, one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcsgd.data import Arrays, ImageFiles, Pairs, Ratings, Split, Store, Windows
from hpcsgd.training.tasks.classification import Classification
from hpcsgd.training.tasks.language import Language
from hpcsgd.training.tasks.recommendation import Recommendation
from hpcsgd.training.tasks.super_resolution import SuperResolution
from hpcsgd.training.tasks.task import Result, Task

TASKS: Mapping[type[Split], Callable[[Any], Task]] = {
    Store: Classification,
    Arrays: Classification,
    ImageFiles: Classification,
    Pairs: SuperResolution,
    Windows: Language,
    Ratings: Recommendation,
}


def task_of(data: Split) -> Task:
    """That which this data is for."""
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
