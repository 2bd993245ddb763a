"""The optimizers, learning-rate schedulers and methods that a job file can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import optim
from torch.optim.lr_scheduler import LRScheduler

from hpcsgd.config.reader import as_table
from hpcsgd.config.schema import MethodSection
from hpcsgd.core.method import Method
from hpcsgd.engine.muon import muon
from hpcsgd.engine.qhadam import QHAdam
from hpcsgd.train.families import OPTIMIZERS, method_of, subclasses

OF_A_MODEL: Mapping[str, Callable[..., optim.Optimizer]] = {**OPTIMIZERS, "Muon": muon, "QHAdam": QHAdam}
"""Optimizers that take a model's parameters, or a model if their first parameter is annotated so."""
SCHEDULERS = subclasses(optim.lr_scheduler, LRScheduler)


def make_method(section: MethodSection, steps_per_epoch: int, total_steps: int | None = None) -> Method:
    """Return the method that `section` describes, for a run of `total_steps`, if they are known.

    Raises `UserError`, which names the key of the job file.
    """
    return method_of(as_table(section), steps_per_epoch, total_steps)
