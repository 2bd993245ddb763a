"""`save` and `load`: the checkpoints of `hpcsgd train` for training loops that somebody else has written.

Beside what `snapshot` saves of each optimizer, rank 0 saves the script's items, and every other rank those
that are not the same on all ranks. On the same P × K each rank gets back what was its own.
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
    """Save a checkpoint in `folder`, of a training loop of your own; collective.

    Saved are the model, the optimizer and the method of each one of the `optimizers`, the process-wide random
    generators of each rank, and what is given by name: objects with `state_dict()`, such as a `Sampler`, a
    scheduler or a `GradScaler`; random generators; and values, which are numbers, strings, bytes, None,
    tensors, arrays of NumPy, and lists, tuples, sets, dicts, and those of `collections`, of these. Values
    come back as they were, tensors on the CPU. What would not, such as a named tuple, is refused.

    A checkpoint is complete on all ranks or it is not there, however the job ends. The two newest ones are
    kept; they are named after the updates that the first optimizer has made. Returns when all is on the disk.
    Older ones are removed if they are of this training, that is, if these optimizers have saved them, or have
    loaded from the folder. Where others are there nothing is written.

    Call it between two steps: not inside `averaged_model()`, nor after some of the backward passes of a step.

    Not to be confused with `torch.save`, which saves what one rank has.

    Args:
        folder: the same on all ranks, on a file system that all of them see. It is made if need be. Until
            the job ends no other one can save there, which a file `run.lock` in it sees to.
        optimizers: one `DistributedOptimizer`, or several, each with its own model; also those inside a
            `NaturalGradient`. All that are saved in one folder are given in each call.
        state: by names of your choice, the same on all ranks.

    Raises:
        UserError: where ranks call it with unlike arguments, an object cannot be saved, or the folder has
            checkpoints of another training.
        JobError: where a rank cannot write, or another job saves there. Earlier checkpoints stay.

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
    told = {"kinds": loop.given.kinds, "classes": loop.given.classes, "differing": differing}
    loop.checkpoints.write(loop.optimizers[0].t, {**first, FURTHER: further, ITEMS: told, GIVEN: kept})
    training.has_saved(loop.optimizers[0].t)
    trainings.remember(loop.folder, loop.optimizers, training)


@checked
def load(folder: str | os.PathLike[str], *optimizers: optim.Optimizer, **state: Any) -> dict[str, Any]:
    """Go on from the newest whole checkpoint that `save` has made in `folder`; collective.

    On the same P × K each rank has its own again, to the bit, random generators included. On another P × K
    models and states are brought together and cut anew, as for `hpcsgd train --resume`. Random generators
    then stay as they are. Objects and values that were the same on all ranks come along. Of objects that were
    not, floating-point and complex tensors come as the mean of all ranks, and anything else that differed is
    refused; values that were not are those that you give, with a warning.

    Without a checkpoint nothing changes, and a line of the log says so.

    Not to be confused with `torch.load`, which returns what one rank has saved.

    Args:
        folder: as for `save`; not the checkpoint itself. Its newest checkpoint that is whole is taken.
        optimizers: as many as were saved, in the same order, around models of the same layout.
        state: what was saved, by the same names. Objects and random generators are put back where they are:
            into one of the same class, one derived from it, or, of a module, any that has the same state. A
            value says what to begin with if there is no checkpoint. None: the script goes on without.

    Returns:
        The values by their names: those of the checkpoint, or where there is none those that were given.

    Raises:
        UserError: where ranks call it with unlike arguments, the checkpoint is of another model, optimizer or
            method, or has other names or classes, or all checkpoints are damaged.
        JobError: where a rank cannot read.

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
        for name in (name for name in state if name in found and name not in given):  # in the same order
            items.load(state[name], found[name], f"{saved.path}: {name}")
    loop.goes_on()
    if loop.topology.rank == 0:
        log.info("going on at step %d of a checkpoint of %d × %d ranks", saved.step, saved.P, saved.K)
    return {name: found.get(name, value) for name, value in given.items()}


@dataclass(frozen=True)
class _Loop:
    """What a script gives `save` and `load`."""

    folder: Path
    optimizers: Sequence[DistributedOptimizer]
    around: Sequence[OuterWrapper | None]
    """What goes around each of them."""
    given: Given
    """What the items are."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Those in the folder."""
        return Checkpoints(self.folder, self.topology)

    @property
    def topology(self) -> Topology:
        """That of all optimizers."""
        return self.optimizers[0].topology

    @property
    def device(self) -> torch.device:
        """On which the first model is."""
        return self.optimizers[0].buckets[0].w.device

    def captured(self, number: int) -> Tree:
        """What this rank saves of an optimizer; the first one brings the random generators."""
        around = self.around[number]
        own = {
            "generators": None if number else generators_state(self.device),
            "estimates": None if around is None else around.estimates(),
        }
        return capture(self.optimizers[number], shared={}, own=own)

    def restored(self, number: int, saved: Saved) -> Tree | None:
        """Put an optimizer back; return this rank's random generators, None on another P × K."""
        _, own = restore(replace(saved, optimizer=number), self.optimizers[number])
        if (around := self.around[number]) is not None:
            around.resume_from(None if own is None else own["estimates"])
        return None if own is None else own["generators"]

    def goes_on(self) -> None:
        """What is in the folder is this training's from now on."""
        training = trainings.Training(self.optimizers)
        if self.topology.rank == 0:
            training.goes_on(self.folder)
        trainings.remember(self.folder, self.optimizers, training)


def _begun(
    call: str, folder: str | os.PathLike[str], given: Sequence[optim.Optimizer], state: Mapping[str, Any]
) -> _Loop:
    """Check that all ranks are in this `call`, with the same arguments; collective."""
    around = [each if isinstance(each, OuterWrapper) else None for each in given]
    inner = [each.optimizer if isinstance(each, OuterWrapper) else each for each in given]
    optimizers = [each for each in inner if isinstance(each, DistributedOptimizer)]
    if not given or len(optimizers) < len(given):
        kinds = ", ".join(type(each).__name__ for each in given) or "nothing"
        raise UserError(f"{call}: {kinds} behind the folder: a DistributedOptimizer belongs there")
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
            raise UserError(f"{call} is not for groups that may die: let `hpcsgd train` save these")
    first, *others = topology.world.gather_objects((str(path), sorted(kinds.items())))
    for rank, told in enumerate(others, start=1):
        if told != first:
            raise UserError(f"{call}: {_written(first)} on rank 0, {_written(told)} on rank {rank}")
    classes = {name: items.classes_of(state[name]) for name in kinds if kinds[name] != items.VALUE}
    return _Loop(path, optimizers, around, Given(len(optimizers), kinds, classes))


def _path(call: str, folder: object) -> Path:
    given = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not isinstance(given, str) or "\0" in given:
        raise UserError(f"{call}: {folder!r} is no path of a folder")
    return Path(given).absolute()


def _written(told: tuple[str, Sequence[tuple[str, str]]]) -> str:
    folder, kinds = told
    return f"{folder!r} with {', '.join(f'{name} ({kind})' for name, kind in kinds) or 'nothing by name'}"
