"""Where in which bucket each parameter lies.

Buckets run backwards, so that they leave while the backward pass goes on. Parameters that an optimizer
updates element by element lie one behind the other, and chunks cut them anywhere. Those that it has to see
whole are dealt: each lies in one chunk, so that one position owns it, and chunks are padded to the longest of
the bucket. Longest processing time first (R. L. Graham: Bounds on Multiprocessing Timing Anomalies, SIAM
Journal on Applied Mathematics, 1969): the costliest tensor goes to whoever has least to do so far, and nobody
has more than 4/3 − 1/(3K) times what the busiest has where tensors are dealt as well as can be. A bucket of
such tensors grows until its chunks are about as long: as many equal layers as positions need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from hpcsgd.core.pending_gradient import PendingGradient
from hpcsgd.errors import UserError

EMPTY = 1 / 16
"""The part of a bucket of whole tensors that may be padding, where more tensors could make it less."""


class Slot:
    """One parameter as a view of its bucket's elements [start, stop)."""

    first = 0
    """Which of the parameter's elements, in memory order, is at `start`."""

    def __init__(self, name: str, param: nn.Parameter, start: int, number: int) -> None:
        self.name = name
        self.param = param
        self.start = start
        self.stop = start + self.tensor.numel()
        self.number = number
        """Its place among all parameters, in the order of the forward pass."""
        self._view: Any = None
        """The parameter's place in g, in its shape and strides; None until there is room for gradients."""
        self.padded = self.stop - start  # so many elements of w are for it
        self._part: Any = None  # these elements
        self._place: Any = None  # among them the parameter, in its shape and strides
        self._home: int | None = None

    @property
    def tensor(self) -> Tensor:
        """What there is of the parameter on this rank: all of it."""
        return self.param

    @property
    def gradient(self) -> Tensor | None:
        """Likewise of its gradient, wherever that is."""
        return self.param.grad

    def move_into(self, w: Tensor) -> None:
        """Make the parameter a view of `w`, keeping its values."""
        part = w[self.start : self.start + self.padded]
        # With a storage of its own, in the same memory if it has any: who saves it saves nothing else.
        self._part = part if part.is_meta else from_dlpack(to_dlpack(part))
        self._place = shaped(self._part, 0, self.tensor)
        self._place.copy_(self.tensor.detach())
        self._become(self._place)
        self._home = self.tensor.data_ptr()

    def at_home(self) -> bool:
        """Whether nobody has moved the parameter elsewhere since."""
        return self.tensor.data_ptr() == self._home

    def come_home(self) -> None:
        """Make a parameter that was given other memory its view of `w` again, with the values that it has."""
        if not self.at_home():
            require_alike(self.name, self.tensor, self._place)
            self._place.copy_(self.tensor.detach())
            self._become(self._place)

    def make_room(self, g: Tensor) -> None:
        """Gradients are to be views of `g`."""
        self._view = shaped(g, self.start, self.tensor)

    def is_attached(self) -> bool:
        """Whether `param.grad` is the view: nobody has put another tensor, or None, in its place."""
        return self._is_view(self.gradient)

    def on_use(self, use: Callable[[], Callable[[], None] | None]) -> None:
        """While the gradient is pending, its first use calls what `use`, a weak reference, refers to."""
        self._view.use = use

    def pend(self) -> None:
        """What the view holds is not the averaged gradient, or not all of it."""
        self._view.__class__ = PendingGradient

    def settle(self) -> None:
        """The view holds the gradient, and is a plain tensor."""
        self._view.__class__ = Tensor

    @property
    def pending(self) -> bool:
        """Whether it is so that the first use of the gradient has to average it."""
        return self._view.__class__ is PendingGradient

    def attach(self) -> None:
        """Make `param.grad` the view, keeping the gradient that autograd or the user put there, if any."""
        grad = self.gradient
        if self._is_view(grad):
            return
        self.settle()
        if grad is None:
            self._view.zero_()
            return
        if grad.layout != torch.strided:
            raise UserError(
                f"gradient of {self.name} is sparse; only dense ones are exchanged (sparse=False)"
            )
        self._view.copy_(grad.detach())
        self.show()

    def any(self) -> bool:
        """Whether the view holds anything but zeros."""
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return bool(self._view.any())

    def show(self) -> None:
        """Make `param.grad` the view, whatever was there."""
        self._become_gradient(self._view)

    def hide(self) -> None:
        """Make `param.grad` None: nobody has a gradient."""
        self.param.grad = None

    def _become(self, view: Tensor) -> None:
        self.param.data = view

    def _become_gradient(self, view: Tensor) -> None:
        self.param.grad = view

    def _is_view(self, grad: Tensor | None) -> bool:
        return grad is self._view


@dataclass(frozen=True)
class Layout:
    """What one bucket is of."""

    slots: Sequence[Slot]
    """In the order in which they lie there."""
    size: int
    """In elements, padding included: a multiple of K."""
    whole: bool
    """Whether no chunk cuts a parameter."""
    pinned: bool = False
    """Whether it is to lie in page-locked memory of the host."""


class Entry(NamedTuple):
    """One parameter, before it has a place."""

    number: int
    """Its own among all, in the order of the forward pass."""
    name: str
    param: nn.Parameter


def nbytes(params: Iterable[nn.Parameter]) -> int:
    """Of all together."""
    return sum(p.numel() * p.element_size() for p in params)


def bucket_bytes(model_bytes: float, megabytes: float | None = None) -> float:
    """Of a bucket: `megabytes`, or where nobody says, a sixteenth of the model, from 1 to 4 MB.

    What leaves last has no backward pass to hide behind, so it is to be a small part; and every bucket costs
    messages. Measured by `benchmarks/step_time.py`.
    """
    return 1e6 * megabytes if megabytes is not None else min(max(model_bytes / 16, 1e6), 4e6)


def cut(
    named: Iterable[tuple[str, nn.Parameter]],
    K: int,
    bucket_bytes: float,
    whole: Collection[nn.Parameter] = frozenset(),
) -> list[Layout]:
    """What each bucket is of, in the order in which they become ready; `whole` are those that nobody cuts.

    Parameters come in the order of the forward pass. Each bucket is of one dtype and device, and ends once it
    reaches `bucket_bytes`, one of whole parameters once it is well filled besides. Raises `UserError` for a
    parameter without a dense layout.
    """
    runs: dict[tuple[torch.dtype, torch.device, bool], list[list[Entry]]] = {}
    filled: dict[object, int] = {}  # bytes of the last run of each kind
    for number, (name, param) in reversed(list(enumerate(named))):
        if param.numel() == 0:
            continue
        _require_dense(name, param)
        kind = param.dtype, param.device, param in whole
        of_kind = runs.setdefault(kind, [[]])
        of_kind[-1].append(Entry(number, name, param))
        filled[kind] = filled.get(kind, 0) + nbytes([param])
        if filled[kind] >= bucket_bytes and not (param in whole and _too_empty(of_kind[-1], K)):
            of_kind.append([])
            filled[kind] = 0
    found: list[tuple[int, Layout]] = []
    for (_, _, undivided), of_kind in runs.items():
        some = [run for run in of_kind if run]
        some, laid = (_well_filled(some, K), _dealt) if undivided else (some, _side_by_side)
        found += [(run[-1].number, laid(run, K)) for run in some]
    return [layout for _, layout in sorted(found, key=lambda each: -each[0])]


def deal(costs: Sequence[float], K: int) -> list[list[int]]:
    """Which of so many tasks each of K workers gets, by their costs: longest processing time first."""
    loads, hands = [0.0] * K, [list[int]() for _ in range(K)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        j = loads.index(min(loads))
        loads[j] += costs[i]
        hands[j].append(i)
    return [sorted(hand) for hand in hands]


def cost(shape: torch.Size) -> int:
    """What the update of a tensor takes, up to a factor: m·n·min(m, n) for a matrix of m × n, as each
    iteration of Newton and Schulz; one for each element of a vector."""
    numel = shape.numel()
    m = shape[0] if shape else 1
    return numel * min(m, numel // m)


def shaped(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """The elements of `flat` from `offset` on, in the shape and memory order of `like`."""
    return flat.as_strided(like.size(), like.stride(), flat.storage_offset() + offset)


def require_alike(name: str, found: Tensor, expected: Tensor) -> None:
    """Raise `UserError` if a parameter has another shape, type or device than at the wrapping."""
    if (found.shape, found.dtype, found.device) != (expected.shape, expected.dtype, expected.device):
        raise UserError(
            f"the optimizer made parameter {name} one of {found.dtype} and shape {list(found.shape)} on "
            f"{found.device}; it was {expected.dtype}, {list(expected.shape)} on {expected.device}"
        )


def _well_filled(runs: list[list[Entry]], K: int) -> list[list[Entry]]:
    """The last one joined with those before it, until it is, too."""
    *others, last = runs
    while others and _too_empty(last, K):
        last = others.pop() + last
    return [*others, last]


def _too_empty(run: Sequence[Entry], K: int) -> bool:
    size = K * max(_numel(hand) for hand in _hands(run, K))
    return size - _numel(run) > EMPTY * size


def _side_by_side(run: Sequence[Entry], K: int) -> Layout:
    slots = list(_one_behind_the_other(run, 0))
    return Layout(slots, -(-slots[-1].stop // K) * K, whole=False)


def _dealt(run: Sequence[Entry], K: int) -> Layout:
    hands = _hands(run, K)
    chunk = max(map(_numel, hands))
    slots = [slot for j, hand in enumerate(hands) for slot in _one_behind_the_other(hand, j * chunk)]
    return Layout(slots, K * chunk, whole=True)


def _hands(run: Sequence[Entry], K: int) -> list[list[Entry]]:
    return [[run[i] for i in hand] for hand in deal([cost(x.param.shape) for x in run], K)]


def _one_behind_the_other(entries: Iterable[Entry], start: int) -> Iterator[Slot]:
    for x in entries:
        yield Slot(x.name, x.param, start, x.number)
        start += x.param.numel()


def _numel(entries: Iterable[Entry]) -> int:
    return sum(x.param.numel() for x in entries)


def _require_dense(name: str, param: nn.Parameter) -> None:
    if param.layout != torch.strided:
        raise UserError(f"parameter {name} has layout {param.layout}; only dense tensors can be averaged")
    if param.is_complex():
        raise UserError(
            f"parameter {name} is of {param.dtype}, and complex ones are not averaged: keep it as pairs of "
            "real numbers, by torch.view_as_real"
        )
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.size(), strict=True)):
        if size != 1:
            if stride != expected:
                raise UserError(
                    f"parameter {name} of strides {param.stride()}: its elements are not dense in memory"
                )
            expected *= size
