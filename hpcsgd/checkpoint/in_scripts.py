"""`save` and `load`: checkpoints as of `hpcsgd train`, for training loops that users write themselves.

`snapshot` saves each optimizer. In addition rank 0 saves the script's items, and every other rank saves
those items that differ between ranks. On the same P × K each rank gets its own values back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import optim

from hpcsgd.arguments import checked
from hpcsgd.checkpoint import found_items, items, trainings, tree
from hpcsgd.checkpoint.folder import Checkpoints, Saved, require_outside
from hpcsgd.checkpoint.found_items import GIVEN, ITEMS, Given
from hpcsgd.checkpoint.snapshot import FURTHER, capture, restore
from hpcsgd.checkpoint.tree import Tree
from hpcsgd.core.generators import generators_state, load_generators_state
from hpcsgd.core.topology import Topology
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.wrapping import OuterWrapper
from hpcsgd.errors import UserError, located

log = logging.getLogger(__name__)


@checked
def save(folder: str | os.PathLike[str], *optimizers: optim.Optimizer, **state: Any) -> None:
    """Save a checkpoint of your own training loop in `folder`; collective.

    The checkpoint has the model, the optimizer and the method of each of the `optimizers`, the process-wide
    random generators of each rank, and what is given by name. That may be:

    - objects with `state_dict()`, such as a `Sampler`, a scheduler or a `GradScaler`,
    - random generators,
    - values: numbers, strings, bytes, None, tensors, arrays of NumPy, and lists, tuples, sets, dicts, and
      types of `collections`, of these.

    Values come back as they were, tensors on the CPU. A value that would not, such as a named tuple, is
    refused.

    A checkpoint is either complete on all ranks or does not exist, however the job ends. `save` returns when
    all of it is on the disk. Checkpoints are named after the updates that the first optimizer has made. The
    two newest ones are kept. Older ones are removed if they belong to this training, that is, if these
    optimizers have saved them or have loaded from the folder. If the folder has checkpoints of another
    training, nothing is written.

    Call `save` between two steps: not inside `averaged_model()`, nor after only some of the backward passes
    of a step.

    Args:
        folder: The folder, the same on all ranks, on a file system that all of them see. It is made if it
            does not exist. Until the job ends, a file `run.lock` in it keeps other jobs from saving there.
        optimizers: One `DistributedOptimizer`, or several, each with its own model; also those inside a
            `NaturalGradient`. Each call for a folder must give the same ones.
        state: Objects and values, by names of your choice, the same names on all ranks.

    Raises:
        UserError: If ranks call it with different arguments, an object cannot be saved, or the folder has
            checkpoints of another training.
        JobError: If a rank cannot write, or another job saves there. Earlier checkpoints stay.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> sampler = hpcsgd.Sampler(data, topology)
        >>> state = hpcsgd.load(folder, optimizer, sampler=sampler, epoch=0)
        >>> for epoch in range(state["epoch"], 2):
        ...     sampler.set_epoch(epoch)
        ...     for x, y in DataLoader(data, batch_size=8, sampler=sampler):
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     hpcsgd.save(folder, optimizer, sampler=sampler, epoch=epoch + 1)
        >>> hpcsgd.load(folder, optimizer, sampler=sampler, epoch=0)["epoch"]
        2
    """
    loop = _begun("save()", folder, optimizers, state)
    mine, digests = {}, {}
    with loop.topology.raise_on_all_ranks("saving"):
        training = trainings.training_in(loop.folder, loop.optimizers)
        if loop.topology.rank == 0:
            training.require_all(loop.folder)
        for name, item in state.items():
            with located(name):
                mine[name] = items.state_of(item)
                digests[name] = tree.digest(mine[name])
    with loop.topology.raise_on_all_ranks("saving"):
        if loop.topology.rank == 0:
            loop.checkpoints.claim()
    digests = loop.topology.world.gather_objects(digests)
    differing = [name for name in mine if len({theirs[name] for theirs in digests}) > 1]
    first, further = loop.captured(0), {n: loop.captured(n) for n in range(1, len(optimizers))}
    kept = {name: mine[name] for name in mine if loop.topology.rank == 0 or name in differing}
    reported = {"kinds": loop.given.kinds, "classes": loop.given.classes, "differing": differing}
    loop.checkpoints.write(loop.optimizers[0].t, {**first, FURTHER: further, ITEMS: reported, GIVEN: kept})
    training.has_saved(loop.optimizers[0].t)
    trainings.remember(loop.folder, loop.optimizers, training)


@checked
def load(folder: str | os.PathLike[str], *optimizers: optim.Optimizer, **state: Any) -> dict[str, Any]:
    """Continue from the newest whole checkpoint that `save` has made in `folder`; collective.

    On the same P × K each rank gets its own state back, to the bit, including random generators. On another
    P × K models and optimizer states are cut anew, as by `hpcsgd train --resume`. On another P, or with
    another method, all groups start from the mean of the groups' models and of their optimizer states. The
    log says so if the models differed. On another P × K random generators stay as they are. Objects and
    values that were the same on all ranks are restored. If they differed between ranks:

    - objects get the mean of all ranks for floating-point and complex tensors; anything else that differed
      is refused,
    - values are those that you give, with a warning.

    If there is no checkpoint, nothing changes, and the log says so.

    Args:
        folder: The folder that `save` was given, not a checkpoint inside it.
        optimizers: The optimizers that were saved, in the same order, around models of the same layout.
        state: What was saved, by the same names. Objects and random generators are restored in place. An
            object must be of the same class or one derived from it; a module may be any that has the same
            state. A value is the start value that is used if there is no checkpoint. With None the saved
            item is ignored.

    Returns:
        The values by their names: those of the checkpoint, or if there is none, those that were given.

    Raises:
        UserError: If ranks call it with different arguments, the checkpoint is of another model, optimizer
            or method, it has other names or classes, or all checkpoints are damaged.
        JobError: If a rank cannot read.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> hpcsgd.save(folder, optimizer, best=0.75)
        >>> train(optimizer, steps=1)
        >>> hpcsgd.load(folder, optimizer, best=0.0)
        {'best': 0.75}
        >>> optimizer.t
        2
    """
    loop = _begun("load()", folder, optimizers, state)
    given = {name: item for name, item in state.items() if loop.given.kinds[name] == items.VALUE}
    loop.checkpoints.recover()
    saved = loop.checkpoints.newest()
    if saved is None:
        loop.goes_on()
        if loop.topology.rank == 0:
            log.warning("%s: no checkpoint is there: the training begins anew", loop.folder)
        return given
    with loop.topology.raise_on_all_ranks("reading a checkpoint"):
        wanted = found_items.wanted(saved, loop.given, state)
    generators, *_ = [loop.restored(number, saved) for number in range(len(optimizers))]
    with loop.topology.raise_on_all_ranks("reading a checkpoint"):
        found = found_items.states(saved, loop.topology, wanted)
        if generators is not None:
            load_generators_state(generators, loop.device)
        for name in (
            name for name in state if name in found and name not in given
        ):  # same order on all ranks
            items.load(state[name], found[name], f"{saved.path}: {name}")
    loop.goes_on()
    if loop.topology.rank == 0:
        log.info("going on at step %d of a checkpoint of %d × %d ranks", saved.step, saved.P, saved.K)
    return {name: found.get(name, value) for name, value in given.items()}


@dataclass(frozen=True)
class _Loop:
    """The arguments of a call of `save` or `load`, after they have been checked."""

    folder: Path
    optimizers: Sequence[DistributedOptimizer]
    around: Sequence[OuterWrapper | None]
    """For each of the optimizers: the `OuterWrapper` around it, or None."""
    given: Given
    """The number of optimizers, and the kinds and classes of the items."""

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the folder."""
        return Checkpoints(self.folder, self.topology)

    @property
    def topology(self) -> Topology:
        """The topology of the first optimizer, which all optimizers share."""
        return self.optimizers[0].topology

    @property
    def device(self) -> torch.device:
        """The device of the first model."""
        return self.optimizers[0].buckets[0].w.device

    def captured(self, number: int) -> Tree:
        """Return the state that this rank saves of optimizer `number`; number 0 includes generators."""
        around = self.around[number]
        own = {
            "generators": None if number else generators_state(self.device),
            "estimates": None if around is None else around.estimates(),
        }
        return capture(self.optimizers[number], shared={}, own=own)

    def restored(self, number: int, saved: Saved) -> Tree | None:
        """Restore optimizer `number`. Return this rank's generator states, or None on another P × K."""
        _, own = restore(replace(saved, optimizer=number), self.optimizers[number])
        if (around := self.around[number]) is not None:
            around.resume_from(None if own is None else own["estimates"])
        return None if own is None else own["generators"]

    def goes_on(self) -> None:
        """Record that the checkpoints in the folder belong to this training from now on."""
        training = trainings.Training(self.optimizers)
        with self.topology.raise_on_all_ranks("reading checkpoints"):
            if self.topology.rank == 0:
                training.goes_on(self.folder)
        trainings.remember(self.folder, self.optimizers, training)


def _begun(
    call: str, folder: str | os.PathLike[str], given: Sequence[optim.Optimizer], state: Mapping[str, Any]
) -> _Loop:
    """Return the checked arguments of a `call`, which must be the same on all ranks; collective."""
    around = [each if isinstance(each, OuterWrapper) else None for each in given]
    inner = [each.optimizer if isinstance(each, OuterWrapper) else each for each in given]
    optimizers = [each for each in inner if isinstance(each, DistributedOptimizer)]
    if not given or len(optimizers) < len(given):
        kinds = ", ".join(type(each).__name__ for each in given) or "nothing"
        raise UserError(f"{call}: expected DistributedOptimizers after the folder, given {kinds}")
    if len(set(optimizers)) < len(optimizers):
        raise UserError(f"{call}: an optimizer is given twice")
    for optimizer in optimizers:
        optimizer.ready_for(call)
    topology, kinds = optimizers[0].topology, {name: items.kind_of(item) for name, item in state.items()}
    path = Path()
    with topology.raise_on_all_ranks(call):
        for optimizer in optimizers:
            optimizer.require_between_steps(call)
        path = _path(call, folder)
        if topology.rank == 0:
            require_outside(path)
        items.require_beside(state, optimizers)
        if topology.is_elastic:
            raise UserError(f"{call} does not support elastic groups: `hpcsgd train` saves them")
    first, *others = topology.world.gather_objects((str(path), sorted(kinds.items())))
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            raise UserError(f"{call}: {_written(first)} on rank 0, {_written(theirs)} on rank {rank}")
    classes = {name: items.classes_of(state[name]) for name in kinds if kinds[name] != items.VALUE}
    return _Loop(path, optimizers, around, Given(len(optimizers), kinds, classes))


def _path(call: str, folder: object) -> Path:
    given = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not isinstance(given, str) or "\0" in given:
        raise UserError(f"{call}: {folder!r} is no path of a folder")
    return Path(given).absolute()


def _written(reported: tuple[str, Sequence[tuple[str, str]]]) -> str:
    folder, kinds = reported
    return f"{folder!r} with {', '.join(f'{name} ({kind})' for name, kind in kinds) or 'nothing by name'}"
