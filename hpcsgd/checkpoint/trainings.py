"""The checkpoints in a folder that belong to a script's training.

A training owns the checkpoints that it has saved in the folder, and those that were in the folder when it was
resumed. Saving removes or replaces no other checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary, ref

from hpcsgd.checkpoint.folder import title, titles
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError


class Training:
    """One training of a script, identified by the `optimizers` that it saves together, in their order."""

    def __init__(self, optimizers: Sequence[DistributedOptimizer]) -> None:
        self._optimizers = [ref(each) for each in optimizers]
        self._own: set[str] = set()
        """The names of the checkpoints that belong to this training, as far as this rank knows."""

    def is_of(self, optimizers: Sequence[DistributedOptimizer]) -> bool:
        """Return whether this training saves exactly these `optimizers`, in this order."""
        return [each() for each in self._optimizers] == [*optimizers]

    def goes_on(self, folder: Path) -> None:
        """Count all checkpoints in `folder` as the training's own, also damaged ones, which `load` skips."""
        self._own.update(titles(folder))

    def has_saved(self, step: int) -> None:
        """Count the checkpoint of `step` as the training's own."""
        self._own.add(title(step))

    def require_all(self, folder: Path) -> None:
        """Raise `UserError` if `folder` has other checkpoints, which saving could remove or replace."""
        others = [name for name in titles(folder) if name not in self._own]
        if others:
            raise UserError(
                f"{folder} has {', '.join(others)}, which this training has neither saved nor loaded, and "
                "nothing was written: call hpcsgd.load before training to go on from there, give a folder of "
                "its own, or remove what is there; several optimizers are saved by one call"
            )


_trainings: WeakKeyDictionary[DistributedOptimizer, dict[str, Training]] = WeakKeyDictionary()
"""The trainings of each optimizer, by folder."""


def training_in(folder: Path, optimizers: Sequence[DistributedOptimizer]) -> Training:
    """Return the training of these `optimizers` in `folder`: the recorded one, or else a new one.

    Raises:
        UserError: If some of them have been saved in `folder` with other optimizers or in another order.
    """
    key = os.path.realpath(folder)
    found = [before for each in optimizers if (before := _trainings.get(each, {}).get(key)) is not None]
    for before in found:
        if not before.is_of(optimizers):
            raise UserError(
                f"{folder} has a checkpoint of some of these {len(optimizers)} optimizers with others, or in "
                "another order: give the same ones in each call, all of them"
            )
    return found[0] if found else Training(optimizers)


def remember(folder: Path, optimizers: Sequence[DistributedOptimizer], training: Training) -> None:
    """Record `training` as the one that `training_in` returns for these optimizers and this folder."""
    for each in optimizers:
        _trainings.setdefault(each, {})[os.path.realpath(folder)] = training
