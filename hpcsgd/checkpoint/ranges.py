"""Parameters and optimizer state in the ranges that ranks saved, to be read in any other ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.checkpoint import tree
from hpcsgd.core.buffers import is_averaged, widened
from hpcsgd.core.elements import in_rows
from hpcsgd.core.flat import Bucket, ShardRange
from hpcsgd.core.state import State
from hpcsgd.engine.iterates import is_like_parameter
from hpcsgd.engine.master import MASTER
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.state_of_parts import RangeState


@dataclass(frozen=True)
class SavedRange:
    """Elements [start, stop) of a parameter in the file of the rank that owned them, not read yet."""

    start: int
    stop: int
    w: tree.Item
    elements: dict[str, tree.Item]
    rest: tree.Item
    method: dict[str, dict[str, tree.Item]]

    @property
    def parameter(self) -> tree.Item:
        """The elements of the parameter, in the width in which it is updated."""
        return self.elements.get(MASTER, self.w)


def capture_ranges(
    optimizer: DistributedOptimizer, w: Sequence[Tensor], method: Mapping[str, Mapping[str, Sequence[Tensor]]]
) -> tree.Tree:
    """Return the ranges of parameters that this rank owns, by parameter name.

    `w` are its shards of the model, one per bucket. `method` has the method's vectors by role and name. Each
    range has its elements of the model, of the optimizer state and of these vectors.
    """
    numbers = {id(bucket): i for i, bucket in enumerate(optimizer.buckets)}
    pieces = {}
    for bucket, piece, state in optimizer.local.states_by_range():
        i = numbers[id(bucket)]
        pieces[piece.slot.name] = {
            "start": piece.start,
            "stop": piece.stop,
            "w": values_of_range(w[i], bucket, piece).to(bucket.w.dtype),
            "elements": state.elements,
            "rest": state.rest,
            "method": {
                role: {name: values_of_range(vectors[i], bucket, piece) for name, vectors in named.items()}
                for role, named in method.items()
            },
        }
    return pieces


def values_of_range(vector: Tensor, bucket: Bucket, piece: ShardRange) -> Tensor:
    """Return the elements of a range from a `vector` laid out like `param_shard` or `w`.

    Complex elements are rows of two numbers.
    """
    like_own = vector.numel() == bucket.param_shard.numel()
    return in_rows(vector[piece.in_own if like_own else piece.in_w], bucket.reals)


class SavedGroups:
    """Some groups of a checkpoint, in the files of their ranks. Reading returns the mean of the groups."""

    def __init__(self, groups: Sequence[Sequence[tree.Item]]) -> None:
        self._groups = [_index(files) for files in groups]
        self._files = [file for files in groups for file in files]
        self.differ = False
        """True if the models of the groups differ in elements that `w` has returned."""

    def w(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a parameter."""
        theirs = (_elements(group[name], start, stop, lambda piece: piece.w) for group in self._groups)
        return mean(self._compared(theirs))

    def _compared(self, values: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield `values`, one per group, and record whether they differ."""
        before = next(values)
        yield before
        for value in values:
            self.differ = self.differ or not torch.equal(before, value)
            before = value
            yield value

    def state(self, name: str, start: int, stop: int) -> RangeState:
        """Return the optimizer state of elements [start, stop); empty if no group updated the parameter.

        A group that has not updated it counts in the mean of a raw iterate, with the parameter itself.
        """
        everyone = [group[name] for group in self._groups if name in group]
        groups = [pieces for pieces in everyone if _has_state(pieces)]
        if not groups:
            return RangeState({}, {})
        fullest = max(groups, key=lambda pieces: len(pieces[0].elements))[0]  # others may have less state
        elements = {
            key: mean(
                _elements(g, start, stop, lambda piece, key=key: piece.elements.get(key, piece.parameter))
                for g in everyone
                if key in g[0].elements or is_like_parameter(key)
            )
            for key in fullest.elements
        }
        return RangeState(elements, tree.read(fullest.rest))

    def states(self) -> Iterator[tuple[str, list[State]]]:
        """Yield each role with the method's state of every rank, not read yet, without the shards."""
        methods = [tree.items(tree.items(tree.items(file)["optimizer"])["method"]) for file in self._files]
        for role in methods[0]:
            yield role, [State.from_dict(tree.items(method[role])) for method in methods]

    def shard_names(self) -> dict[str, list[str]]:
        """Return the names of the method's sharded vectors, by role."""
        pieces = next(iter(self._groups[0].values()))
        return {role: list(named) for role, named in pieces[0].method.items()}

    def shard(self, role: str, key: str, name: str, start: int, stop: int) -> Tensor:
        """Return the elements for [start, stop) of parameter `name` in the method's vector `key`."""

        def theirs(piece: SavedRange) -> tree.Item:
            return piece.method[role][key]

        return mean(_elements(group[name], start, stop, theirs) for group in self._groups)


def mean(values: Iterator[Tensor]) -> Tensor:
    """Return the mean of `values`, rounded once; or the first if values of their dtype are not averaged."""
    first = next(values)
    if not is_averaged(first):
        return first
    total, count = widened(first), 1
    for value in values:
        total += value.to(total.dtype)
        count += 1
    return (total / count).to(first.dtype)


def _index(files: Sequence[tree.Item]) -> dict[str, list[SavedRange]]:
    pieces: dict[str, list[SavedRange]] = {}
    for file in files:
        for name, item in tree.items(tree.items(file)["pieces"]).items():
            children = tree.items(item)
            start, stop = (tree.read_item(children[key]) for key in ("start", "stop"))
            elements = tree.items(children["elements"])
            method = {role: tree.items(named) for role, named in tree.items(children["method"]).items()}
            piece = SavedRange(start, stop, children["w"], elements, children["rest"], method)
            pieces.setdefault(name, []).append(piece)
    return pieces


def _has_state(pieces: Sequence[SavedRange]) -> bool:
    return bool(pieces) and bool(pieces[0].elements or tree.items(pieces[0].rest))


def _elements(
    pieces: Sequence[SavedRange], start: int, stop: int, of: Callable[[SavedRange], tree.Item]
) -> Tensor:
    """Return elements [start, stop) of the tensor that `of` returns, from all ranges with some of them."""
    cuts = []
    for piece in sorted(pieces, key=lambda p: p.start):
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            cuts.append(tree.read_slice(of(piece), low - piece.start, high - piece.start))
    return torch.cat(cuts)
