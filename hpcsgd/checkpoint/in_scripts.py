"""`save` and `load`: the checkpoints of `hpcsgd train` for training loops that somebody else has written.

Beside what `snapshot` saves of each optimizer, rank 0 saves the script's items, and every other rank those
that are not the same on all ranks. On the same P × K each rank gets back what was its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import optim

from hpcsgd.checkpoint import items, tree
from hpcsgd.checkpoint.folder import Checkpoints, Saved
from hpcsgd.checkpoint.snapshot import FIRST, FURTHER, Place, all_places, capture, opened, restore
from hpcsgd.checkpoint.tree import Tree
from hpcsgd.core.generators import generators_state, load_generators_state
from hpcsgd.core.topology import Job
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.wrapping import Outermost
from hpcsgd.errors import UserError, located, near_miss

log = logging.getLogger(__name__)

ITEMS, GIVEN = "items", "given by name"
"""Under which keys a rank's file has what is known of a script's items, and those that this rank saves."""


def save(folder: str | os.PathLike[str], *optimizers: optim.Optimizer, **state: Any) -> None:
    """Save a checkpoint in `folder`, of a training loop of your own; collective.

    Saved are the model, the optimizer and the method of each one of the `optimizers`, the process-wide random
    generators of each rank, and what is given by name: objects with `state_dict()`, such as a `Sampler`, a
    scheduler or a `GradScaler`; random generators; and values, which are numbers, strings, tensors, arrays of
    numbers, None, and lists, tuples and dicts of these.

    A checkpoint is complete on all ranks or it is not there, however the job ends. The two newest ones are
    kept; they are named after the updates that the first optimizer has made. Returns when all is on the disk.

    Not to be confused with `torch.save`, which saves what one rank has.

    Args:
        folder: the same on all ranks, on a file system that all of them see. It is made if need be.
        optimizers: one `DistributedOptimizer`, or several, each with its own model; also those inside a
            `NaturalGradient`.
        state: by names of your choice, the same on all ranks.

    Raises:
        UserError: where ranks call it with unlike arguments, or an object cannot be saved.
        JobError: where a rank cannot write. Earlier checkpoints stay as they were.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, hpcsgd.hierarchical(every=8))
        >>> sampler = hpcsgd.Sampler(data, job)
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
    with loop.job.together("saving"):
        mine = {name: items.state_of(item) for name, item in state.items()}
    digests = loop.job.world.gather_objects({name: items.digest(value) for name, value in mine.items()})
    differing = [name for name in mine if len({theirs[name] for theirs in digests}) > 1]
    first, further = loop.captured(0), {n: loop.captured(n) for n in range(1, len(optimizers))}
    kept = {name: mine[name] for name in mine if loop.job.rank == 0 or name in differing}
    told = {"kinds": loop.kinds, "differing": differing}
    loop.checkpoints.write(loop.optimizers[0].t, {**first, FURTHER: further, ITEMS: told, GIVEN: kept})


def load(folder: str | os.PathLike[str], *optimizers: optim.Optimizer, **state: Any) -> dict[str, Any]:
    """Go on from the newest whole checkpoint that `save` has made in `folder`; collective.

    On the same P × K each rank has its own again, to the bit, random generators included. On another P × K
    models and states are brought together and cut anew, as for `hpcsgd train --resume`. Random generators
    then stay as they are. Objects and values that were the same on all ranks come along. Of objects that were
    not, floating-point and complex tensors come as the mean of all ranks, and anything else that differed is
    refused; values that were not are those that you give, with a warning.

    Without a checkpoint nothing changes.

    Not to be confused with `torch.load`, which returns what one rank has saved.

    Args:
        folder: as for `save`.
        optimizers: as many as were saved, in the same order, around models of the same layout.
        state: what was saved, by the same names. Objects and random generators are put back where they are,
            and a value says what to begin with if there is no checkpoint. None: the script goes on without.

    Returns:
        The values by their names: those of the checkpoint, or where there is none those that were given.

    Raises:
        UserError: where ranks call it with unlike arguments, the checkpoint is of another model, optimizer or
            method, or has other names, or all checkpoints are damaged.
        JobError: where a rank cannot read.

    Example:
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, hpcsgd.hierarchical(every=8))
        >>> train(optimizer, steps=2)
        >>> hpcsgd.save(folder, optimizer, best=0.75)
        >>> train(optimizer, steps=1)
        >>> hpcsgd.load(folder, optimizer, best=0.0)
        {'best': 0.75}
        >>> optimizer.t
        2
    """
    loop = _begun("load()", folder, optimizers, state)
    given = {name: item for name, item in state.items() if loop.kinds[name] == items.VALUE}
    saved = loop.checkpoints.newest()
    if saved is None:
        return given
    with loop.job.together("reading a checkpoint"):
        wanted = _wanted(saved, loop.kinds, state, len(optimizers))
    generators, *_ = [loop.restored(number, saved) for number in range(len(optimizers))]
    with loop.job.together("reading a checkpoint"):
        found = _states(saved, loop.job, wanted)
        if generators is not None:
            load_generators_state(generators, loop.device)
        for name in (name for name in state if name in found and name not in given):  # in the same order
            with located(name):
                items.load(state[name], found[name])
    if loop.job.rank == 0:
        log.info("going on at step %d of a checkpoint of %d × %d ranks", saved.step, saved.P, saved.K)
    return {name: found.get(name, value) for name, value in given.items()}


@dataclass(frozen=True)
class _Loop:
    """What a script gives `save` and `load`."""

    checkpoints: Checkpoints
    optimizers: Sequence[DistributedOptimizer]
    around: Sequence[Outermost | None]
    """What goes around each of them."""
    kinds: Mapping[str, str]
    """Of the items, by name."""

    @property
    def job(self) -> Job:
        """That of all optimizers."""
        return self.optimizers[0].job

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
            around.take_up(None if own is None else own["estimates"])
        return None if own is None else own["generators"]


def _begun(
    call: str, folder: str | os.PathLike[str], given: Sequence[optim.Optimizer], state: Mapping[str, Any]
) -> _Loop:
    """Check that all ranks are in this `call`, with the same arguments; collective."""
    around = [each if isinstance(each, Outermost) else None for each in given]
    inner = [each.optimizer if isinstance(each, Outermost) else each for each in given]
    optimizers = [each for each in inner if isinstance(each, DistributedOptimizer)]
    if not given or len(optimizers) < len(given):
        kinds = ", ".join(type(each).__name__ for each in given) or "nothing"
        raise UserError(f"{call}: {kinds} behind the folder: a DistributedOptimizer belongs there")
    for optimizer in optimizers:
        optimizer.ready_for(call)
    job, kinds = optimizers[0].job, {name: items.kind_of(item) for name, item in state.items()}
    path = Path(folder).absolute()
    with job.together(call):
        items.require_beside(state, optimizers)
        if job.has_peers:
            raise UserError(f"{call} is not for groups that may die: let `hpcsgd train` save these")
    first, *others = job.world.gather_objects((str(path), sorted(kinds.items())))
    for rank, told in enumerate(others, start=1):
        if told != first:
            raise UserError(f"{call}: {_written(first)} on rank 0, {_written(told)} on rank {rank}")
    return _Loop(Checkpoints(path, job), optimizers, around, kinds)


def _written(told: tuple[str, Sequence[tuple[str, str]]]) -> str:
    folder, kinds = told
    return f"{folder!r} with {', '.join(f'{name} ({kind})' for name, kind in kinds) or 'nothing by name'}"


def _wanted(
    saved: Saved, kinds: Mapping[str, str], state: Mapping[str, Any], optimizers: int
) -> Mapping[str, str]:
    """Return the items to be read, with their kinds.

    Raises:
        UserError: If others have been saved.
    """
    with opened(saved, [FIRST]) as (file,):
        found = tree.items(file)
        if ITEMS not in found:
            raise UserError(f"{saved.path} is of `hpcsgd train`: go on with that, by --resume")
        there = tree.read_item(tree.items(found[ITEMS])["kinds"])
        if optimizers != (saved_ones := 1 + len(tree.items(found[FURTHER]))):
            raise UserError(f"{saved.path}: {saved_ones} optimizers, and load() was given {optimizers}")
    for name, kind in kinds.items():
        if name not in there:
            raise UserError(f"{saved.path}: nothing was saved as {name}: {near_miss(name, there)}")
        if state[name] is not None and there[name] != kind:
            raise UserError(f"{saved.path}: {name} was {there[name]}, and load() was given {kind}")
    for name, kind in there.items():
        if name not in kinds and kind != items.VALUE:
            raise UserError(
                f"{saved.path}: {name} was saved, and load() was not given it: give {name}=, or {name}=None "
                "to go on without what it was"
            )
    return {name: there[name] for name in kinds if state[name] is not None or there[name] == items.VALUE}


def _states(saved: Saved, job: Job, wanted: Mapping[str, str]) -> dict[str, Any]:
    """Read what this rank goes on with. Where values differed between other ranks than these they are left
    out, and so are their random generators."""
    same = (saved.P, saved.K) == (job.P, job.K)
    with opened(saved, [FIRST]) as (file,):
        differing = tree.read_item(tree.items(tree.items(file)[ITEMS])["differing"])
    read = _read(saved, FIRST, [name for name in wanted if name not in differing])
    own = [name for name in wanted if name in differing]
    if same:
        return read | _read(saved, (job.g, job.j), own)
    for name in own:
        if wanted[name] == items.STATE:
            read[name] = _mean(saved, name)
        elif wanted[name] == items.VALUE and job.rank == 0:
            log.warning("on %d × %d ranks this starts anew: %s", job.P, job.K, name)
    return {name: value for name, value in read.items() if wanted[name] != items.GENERATOR}


def _mean(saved: Saved, name: str) -> Any:
    mean = items.Mean(name)
    for place in all_places(saved):
        mean.add(_read(saved, place, [name])[name])
    return mean.result()


def _read(saved: Saved, place: Place, names: Iterable[str]) -> dict[str, Any]:
    with opened(saved, [place]) as (file,):
        states = tree.items(tree.items(file)[GIVEN])
        return {name: tree.read_item(states[name]) for name in names}
