"""What a checkpoint holds, and how it comes back, on the same P × K or another.

Every rank saves what it alone owns: 1/K of its group's parameters and optimizer state, as pieces of named
parameters, with its buffers. On the same P × K each rank finds its own again, bit for bit. With another K the
pieces of a group are cut anew. With another P all groups start from the mean of the saved ones, as after a
meeting: parameters, element-wise optimizer state and float buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import h5py
import torch
from torch import Tensor, nn

from hpcsgd.checkpoint import tree
from hpcsgd.checkpoint.folder import Saved
from hpcsgd.checkpoint.tree import Tree
from hpcsgd.errors import UserError
from hpcsgd.optimizer import DistributedOptimizer


def capture(optimizer: DistributedOptimizer, *, shared: Tree, own: Tree) -> Tree:
    """This rank's part of a checkpoint. `shared` is alike on all ranks, `own` this rank's (generators)."""
    pieces = {
        piece.slot.name: {
            "start": piece.start,
            "stop": piece.stop,
            "w": bucket.own[piece.offset : piece.offset + piece.stop - piece.start],
            "state": state,
        }
        for bucket, piece, state in optimizer.local.states_by_piece()
    }
    return {
        "pieces": pieces,
        "sizes": {name: param.numel() for name, param in optimizer.trained},
        "buffers": dict(optimizer.model.named_buffers()),
        "frozen": dict(_frozen(optimizer)) if optimizer.job.rank == 0 else {},
        "optimizer": {"t": optimizer.t, "groups": _options(optimizer), "method": optimizer.method.state_dict()},
        "shared": shared,
        "own": own,
    }


@torch.no_grad()
def restore(saved: Saved, optimizer: DistributedOptimizer) -> tuple[Tree, Tree | None]:
    """Put a checkpoint back; return `shared`, and `own` if P × K is as it was. Collective.

    Raises `UserError` where the checkpoint is of another model.
    """
    job = optimizer.job
    same = (saved.P, saved.K) == (job.P, job.K)
    groups = [job.g] if saved.P == job.P else list(range(saved.P))
    with _open(saved, groups) as files:
        _require_same_model(saved, files[0][0], optimizer)
        _restore_pieces([_index(group) for group in files], optimizer)
    mine = saved.rank_file(job.g, job.j) if same else saved.rank_file(0, 0)
    with h5py.File(mine) as file, h5py.File(saved.rank_file(0, 0)) as first:
        children = tree.items(file)
        _restore_buffers(saved, children["buffers"] if same else None, optimizer.model)
        _copy_into(dict(_frozen(optimizer)), tree.read(tree.items(first)["frozen"]))
        state = tree.read(children["optimizer"])
        optimizer.take_up(state["t"], state["groups"], state["method"])
        return tree.read(children["shared"]), tree.read(children["own"]) if same else None


def _restore_pieces(groups: list[Pieces], optimizer: DistributedOptimizer) -> None:
    names = {param: name for name, param in optimizer.trained}
    for bucket, piece, _ in optimizer.local.states_by_piece():
        w = _mean(groups, lambda g, p=piece: _range(g[p.slot.name], "w", p.start, p.stop))
        bucket.own[piece.offset : piece.offset + piece.stop - piece.start] = w
    optimizer.gather_parameters()

    def lookup(param: nn.Parameter, start: int, stop: int) -> dict[str, Any]:
        return _state(groups, names[param], start, stop)

    optimizer.local.load_states(lookup)


Pieces = dict[str, list[dict[str, Any]]]
"""Of one saved group: by parameter, the children of each piece, unread."""


def _index(files: list[h5py.File]) -> Pieces:
    pieces: Pieces = {}
    for file in files:
        for name, piece in tree.items(tree.items(file)["pieces"]).items():
            children = tree.items(piece)
            bounds = {key: int(children[key].asstr()[()]) for key in ("start", "stop")}
            pieces.setdefault(name, []).append({**children, **bounds, **tree.items(children["state"])})
    return pieces


def _range(pieces: list[dict[str, Any]], key: str, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of one parameter's `key` (w, or a state tensor), from whoever saved them."""
    cuts = []
    for piece in sorted(pieces, key=lambda p: p["start"]):
        low, high = max(start, piece["start"]), min(stop, piece["stop"])
        if low < high:
            cuts.append(tree.read_slice(piece[key], low - piece["start"], high - piece["start"]))
    return torch.cat(cuts)


def _state(groups: list[Pieces], name: str, start: int, stop: int) -> dict[str, Any]:
    first = groups[0][name][0]
    state: dict[str, Any] = {}
    for key in tree.items(first["state"]):
        if tree.is_vector(first[key]):
            state[key] = _mean(groups, lambda g, k=key: _range(g[name], k, start, stop))
        else:  # a count of steps and the like, the same everywhere
            state[key] = tree.read_item(first[key])
    return state


def _mean(groups: list[Pieces], read: Callable[[Pieces], Tensor]) -> Tensor:
    total = read(groups[0])
    for group in groups[1:]:
        total += read(group)
    return total if len(groups) == 1 else total / len(groups)


def _restore_buffers(saved: Saved, own: h5py.Group | None, model: nn.Module) -> None:
    buffers = dict(model.named_buffers())
    if own is not None:
        _copy_into(buffers, tree.read(own))
        return
    ranks = [saved.rank_file(g, j) for g in range(saved.P) for j in range(saved.K)]
    sums: dict[str, Tensor] = {}
    for path in ranks:
        with h5py.File(path) as file:
            theirs = tree.read(tree.items(file)["buffers"])
        for name, value in theirs.items():
            if name not in sums:
                sums[name] = value
            elif value.is_floating_point():
                sums[name] += value
    _copy_into(buffers, {n: v / len(ranks) if v.is_floating_point() else v for n, v in sums.items()})


def _require_same_model(saved: Saved, file: h5py.File, optimizer: DistributedOptimizer) -> None:
    theirs = tree.read(tree.items(file)["sizes"])
    ours = {name: param.numel() for name, param in optimizer.trained}
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise UserError(
                f"{saved.path}: parameter {name} has {theirs.get(name, 0)} elements in the checkpoint and "
                f"{ours.get(name, 0)} in the model: it is a checkpoint of another model"
            )


def _frozen(optimizer: DistributedOptimizer) -> Iterator[tuple[str, Tensor]]:
    trained = {param for _, param in optimizer.trained}
    return ((n, p) for n, p in optimizer.model.named_parameters() if p not in trained)


def _options(optimizer: DistributedOptimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])


@contextmanager
def _open(saved: Saved, groups: list[int]) -> Iterator[list[list[h5py.File]]]:
    with ExitStack() as stack:
        yield [
            [stack.enter_context(h5py.File(saved.rank_file(g, j))) for j in range(saved.K)] for g in groups
        ]

