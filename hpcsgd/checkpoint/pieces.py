"""Parameters and optimizer state as the ranks saved them, piece by piece, read for any other cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import h5py
import torch
from torch import Tensor

from hpcsgd.checkpoint import tree
from hpcsgd.optimizer import DistributedOptimizer
from hpcsgd.sharding import PieceState


@dataclass(frozen=True)
class SavedPiece:
    """Elements [start, stop) of a parameter in the file of the rank that owned them, unread."""

    start: int
    stop: int
    w: tree.Item
    elements: dict[str, tree.Item]
    rest: tree.Item


def capture_pieces(optimizer: DistributedOptimizer) -> tree.Tree:
    """Parameters and optimizer state that this position owns, by parameter name."""
    return {
        piece.slot.name: {
            "start": piece.start,
            "stop": piece.stop,
            "w": bucket.own[piece.offset : piece.offset + piece.stop - piece.start],
            "elements": state.elements,
            "rest": state.rest,
        }
        for bucket, piece, state in optimizer.local.states_by_piece()
    }


class SavedGroups:
    """Some of the groups of a checkpoint, given as the open files of their positions; read as their mean."""

    def __init__(self, groups: Sequence[Sequence[h5py.File]]) -> None:
        self._groups = [_index(files) for files in groups]

    def w(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a parameter."""
        return mean(_elements(group[name], start, stop) for group in self._groups)

    def state(self, name: str, start: int, stop: int) -> PieceState:
        """Their optimizer state; of groups that never updated the parameter there is none."""
        groups = [group[name] for group in self._groups if _has_state(group.get(name, []))]
        if not groups:
            return PieceState({}, {})
        keys = groups[0][0].elements
        elements = {key: mean(_elements(g, start, stop, key) for g in groups) for key in keys}
        return PieceState(elements, tree.read(groups[0][0].rest))


def mean(values: Iterator[Tensor]) -> Tensor:
    """Rounded once; of values that are no floats, the first."""
    first = next(values)
    if not first.is_floating_point():
        return first
    total, count = first.double(), 1
    for value in values:
        total += value
        count += 1
    return (total / count).to(first.dtype)


def _index(files: Sequence[h5py.File]) -> dict[str, list[SavedPiece]]:
    pieces: dict[str, list[SavedPiece]] = {}
    for file in files:
        for name, item in tree.items(tree.items(file)["pieces"]).items():
            children = tree.items(item)
            start, stop = (tree.read_item(children[key]) for key in ("start", "stop"))
            elements = tree.items(children["elements"])
            piece = SavedPiece(start, stop, children["w"], elements, children["rest"])
            pieces.setdefault(name, []).append(piece)
    return pieces


def _has_state(pieces: Sequence[SavedPiece]) -> bool:
    return bool(pieces) and bool(pieces[0].elements or tree.items(pieces[0].rest))


def _elements(pieces: Sequence[SavedPiece], start: int, stop: int, key: str | None = None) -> Tensor:
    """Elements [start, stop) of w, or of the state tensor `key`, from whoever saved them."""
    cuts = []
    for piece in sorted(pieces, key=lambda p: p.start):
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            dataset = piece.w if key is None else piece.elements[key]
            cuts.append(tree.read_slice(dataset, low - piece.start, high - piece.start))
    return torch.cat(cuts)
