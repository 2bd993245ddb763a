"""The content of a checkpoint, and how it is restored, on the same P × K or another.

Every rank saves its shards, 1/K of its group's parameters and optimizer state, as ranges of named
parameters, its buffers, and frozen parameters that differ between ranks. On the same P × K each rank restores
its own part, bit for bit. With another K the ranges of a group are cut anew. With another P, or another
method, all groups start from the mean of the saved parameters and element-wise optimizer states, as after a
synchronization. On another P × K float buffers and such frozen parameters are the mean over all ranks, and
each part of the method's state follows its rule (`State`). If a parameter server keeps the model, its model
is saved, in place of those that groups have read of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import h5py
import torch
from torch import Tensor, nn

from hpcsgd.checkpoint import frozen, tree
from hpcsgd.checkpoint.folder import Checkpoints, Saved
from hpcsgd.checkpoint.method_state import restored, split_off_shards
from hpcsgd.checkpoint.ranges import SavedGroups, capture_ranges, mean
from hpcsgd.checkpoint.tree import Tree
from hpcsgd.core.buffers import make_writable, put
from hpcsgd.core.elements import as_elements, in_rows, reals_per_element
from hpcsgd.core.fsdp import local, local_of
from hpcsgd.core.state import State
from hpcsgd.core.topology import Topology
from hpcsgd.engine.chained import kind_of
from hpcsgd.engine.inside import load_shared_state, shared_state
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import JobError, UserError

log = logging.getLogger(__name__)

OF_MODEL = ("parameter ", "frozen parameter ", "buffer ")
FURTHER = "further"
"""The key in a rank's file for the optimizers after the first one."""
Place = tuple[int, int]
"""A rank's group index and shard index."""
FIRST: Place = (0, 0)


def capture(optimizer: DistributedOptimizer, *, shared: Tree, own: Tree) -> Tree:
    """Return this rank's part of a checkpoint; collective.

    `shared` is state that is the same on all ranks. `own` is state of this rank alone, such as generators.
    """
    central = optimizer.method.model_holder()
    model = None if central is None or central.traits.local_models else central.model()
    states, shards = split_off_shards(optimizer.method.states())
    return {
        "outline": _outline(optimizer),
        "pieces": capture_ranges(optimizer, model or [b.param_shard for b in optimizer.buckets], shards),
        "buffers": dict(optimizer.model.named_buffers()),
        **frozen.captured(optimizer),
        "optimizer": {
            "t": optimizer.t,
            "groups": _options(optimizer),
            "shared": shared_state(optimizer.local.optimizer),
            "method": states,
            "parts": _parts(optimizer),
        },
        "shared": shared,
        "own": own,
    }


@torch.no_grad()
def restore(saved: Saved, optimizer: DistributedOptimizer) -> tuple[Tree, Tree | None]:
    """Restore a checkpoint; collective. Return `shared`, and `own` if P × K is the same, otherwise None.

    Raises `JobError` if the checkpoint is of another model or optimizer.
    """
    topology = optimizer.topology
    same = (topology.num_groups, topology.group_size) == (saved.P, saved.K)
    with topology.raise_on_all_ranks("reading a checkpoint"):
        mine = (topology.group_index, topology.shard_index) if same else FIRST
        with opened(saved, [mine]) as (file,):
            found = tree.items(file)
            _require_same(saved, tree.read(found["outline"]), _outline(optimizer))
            state = tree.read(found["optimizer"])
            shared, own = tree.read(found["shared"]), tree.read(found["own"])
        groups = _groups_to_read(saved, state["parts"], optimizer)
        with _saved_groups(saved, groups) as source:
            _restore_ranges(source, optimizer)
            goes_on = same and list(groups) == [topology.group_index]
            mine_of_method = {role: State.from_dict(each) for role, each in state["method"].items()}
            method = restored(mine_of_method, source, optimizer, goes_on=goes_on)
        places = [mine] if same else list(all_places(saved))
        _restore_buffers(saved, places, optimizer.model)
        ours = dict(frozen.frozen(optimizer))
        for name, values in _saved_frozen(saved, places):
            put(local(ours[name]), local_of(values, ours[name]))
        load_shared_state(optimizer.local.optimizer, state["shared"])
        optimizer.resume_from(state["t"], state["groups"], method)
    if topology.num_groups != saved.P:
        _log_mean(source, saved, topology)
    optimizer.gather_parameters()
    return shared, own if same else None


def restore_newest(
    checkpoints: Checkpoints, optimizer: DistributedOptimizer
) -> tuple[Saved, Tree, Tree | None] | None:
    """Restore the newest checkpoint, and return it with `shared` and `own`, or None if there is none.

    If another replica group removes the checkpoint meanwhile, a newer one is used.
    """
    while (saved := checkpoints.newest()) is not None:
        try:
            shared, own = restore(saved, optimizer)
        except JobError:
            if checkpoints.whole(saved):
                raise
            continue
        return saved, shared, own
    return None


@torch.no_grad()
def restore_model(saved: Saved, model: nn.Module) -> None:
    """Load the mean of all groups of a checkpoint into `model`, with the saved dtypes.

    This runs in one process, for any P × K. `model` has the memory layout of the run. Raises `UserError` if
    the checkpoint is of another model.
    """
    with opened(saved, [FIRST]) as (file,):
        outline = tree.read(tree.items(file)["outline"])
    still = dict(_saved_frozen(saved, all_places(saved)))
    theirs = {what: _extent(layout) for what, layout in outline.items() if what.startswith(OF_MODEL)}
    _require_same(saved, theirs, _extents(model, still))
    with _saved_groups(saved, range(saved.P)) as source:
        for name, param in model.named_parameters():
            if name in still:
                param.data = param.data.to(still[name].dtype).copy_(still[name])
            else:
                w = as_elements(source.w(name, 0, param.numel()).view(-1), reals_per_element(param))
                param.data = w.as_strided(param.size(), param.stride())
    _restore_buffers(saved, all_places(saved), model)


def _groups_to_read(saved: Saved, parts: Sequence[str], optimizer: DistributedOptimizer) -> Iterable[int]:
    """Return the index of the saved group that this group continues, or all indices to use their mean."""
    topology = optimizer.topology
    if topology.num_groups == saved.P and parts == _parts(optimizer):
        return [topology.group_index]
    if topology.num_groups == saved.P and saved.P > 1 and topology.rank == 0:
        log.info("another method than before: all groups start from the mean of the saved ones")
    return range(saved.P)


def _log_mean(source: SavedGroups, saved: Saved, topology: Topology) -> None:
    """Log on rank 0 that the job starts from the mean of groups, if their models differed; collective."""
    if any(topology.world.gather_objects(source.differ)) and topology.rank == 0:
        log.info("the checkpoint has %d groups whose models differ: this job starts from their mean", saved.P)


@contextmanager
def _saved_groups(saved: Saved, groups: Iterable[int]) -> Iterator[SavedGroups]:
    with ExitStack() as stack:
        of_group = ([(g, j) for j in range(saved.K)] for g in groups)
        yield SavedGroups([stack.enter_context(opened(saved, places)) for places in of_group])


def _restore_ranges(source: SavedGroups, optimizer: DistributedOptimizer) -> None:
    names = {param: name for name, param in optimizer.trained}
    for bucket, piece, _ in optimizer.local.states_by_range():
        own = in_rows(bucket.param_shard[piece.in_own], bucket.reals)
        own.copy_(source.w(piece.slot.name, piece.start, piece.stop))
    optimizer.local.load_states(lambda param, start, stop: source.state(names[param], start, stop))


def _restore_buffers(saved: Saved, places: Iterable[Place], model: nn.Module) -> None:
    make_writable(model)
    with opened(saved, places) as files:
        buffers = [tree.items(tree.items(file)["buffers"]) for file in files]
        for name, buffer in model.named_buffers():
            put(buffer, mean(tree.read_item(theirs[name]) for theirs in buffers))


def _outline(optimizer: DistributedOptimizer) -> dict[str, str]:
    """Return descriptions of optimizer and model, which have to equal those in a checkpoint to restore it."""
    groups = optimizer.local.groups()
    parts = optimizer.method.stateful().items()
    state_of_method = ", ".join(f"{role} ({type(part).__name__})" for role, part in parts) or "none"
    return {
        "optimizer": kind_of(optimizer.local.optimizer),
        "number of param groups": str(len(optimizer.param_groups)),
        "state of the method": state_of_method,
        **{f"parameter {n}": f"{_layout(p)} in param group {groups[p]}" for n, p in optimizer.trained},
        **{f"frozen parameter {name}": _layout(p) for name, p in frozen.frozen(optimizer)},
        **{f"buffer {name}": _layout(b) for name, b in optimizer.model.named_buffers()},
    }


def _layout(x: Tensor) -> str:
    if x.layout != torch.strided:
        return f"{x.dtype} of {list(x.size())}, {x.layout}"
    strides = [stride if size > 1 else 0 for stride, size in zip(x.stride(), x.size(), strict=True)]
    order = "" if x.is_contiguous() else f" with strides {strides}"
    return f"{x.dtype} of {list(x.size())}{order}"


def _extents(model: nn.Module, still: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the entries of `_outline` that describe the model, without dtypes and parameter groups."""
    params = ((f"{'frozen ' * (name in still)}parameter {name}", p) for name, p in model.named_parameters())
    buffers = ((f"buffer {name}", buffer) for name, buffer in model.named_buffers())
    return {what: _extent(_layout(x)) for what, x in (*params, *buffers)}


def _extent(layout: str) -> str:
    kind = "complex numbers, " * layout.startswith("torch.complex")
    return kind + layout.partition(" of ")[2].partition(" in param group")[0]


def _require_same(saved: Saved, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    for what in sorted({**ours, **theirs}, key=lambda what: what in ours and what in theirs):
        if ours.get(what) != theirs.get(what):
            raise UserError(
                f"{saved.path}: {what}: {theirs.get(what, 'nothing')} in the checkpoint, "
                f"{ours.get(what, 'nothing')} in this job: it is of another model or optimizer"
            )


def _parts(optimizer: DistributedOptimizer) -> list[str]:
    """Return the names of the classes of the method's parts. Settings such as `sync_every` do not count."""
    method = optimizer.method
    return [type(part).__name__ for part in (method.grad_reduce, method.schedule, method.averager)]


def _saved_frozen(saved: Saved, places: Iterable[Place]) -> Iterator[tuple[str, Tensor]]:
    """Yield each frozen parameter's name and values; those that differed are the mean of the `places`."""
    with opened(saved, ((0, j) for j in range(saved.K))) as group_0, opened(saved, places) as ranks:
        yield from frozen.saved(group_0, ranks)


def _options(optimizer: DistributedOptimizer) -> list[dict[str, Any]]:
    groups = ([(k, v) for k, v in group.items() if k != "params"] for group in optimizer.param_groups)
    return [{k: v.name if isinstance(v, Enum) else v for k, v in group} for group in groups]


def all_places(saved: Saved) -> Iterator[Place]:
    """Return the group index and shard index of each rank that saved the checkpoint, in rank order."""
    return ((g, j) for g in range(saved.P) for j in range(saved.K))


@contextmanager
def opened(saved: Saved, places: Iterable[Place]) -> Iterator[list[tree.Item]]:
    """Open the files of the ranks at `places`; yield each file's items of optimizer `saved.optimizer`."""
    with ExitStack() as stack:
        # Complete checkpoints are never written to, and parallel file systems often refuse locks.
        files = (h5py.File(saved.rank_file(g, j), "r", locking=False) for g, j in places)
        yield [_of_optimizer(saved.optimizer, stack.enter_context(file)) for file in files]


def _of_optimizer(number: int, file: h5py.File) -> tree.Item:
    found = tree.items(file)
    return tree.items(found[FURTHER])[number] if number else found
