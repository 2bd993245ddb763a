"""Gradients that are not averaged yet: the first use of one averages all of them.

Between `backward()` and `step()` a training loop may read, clip or replace gradients. In plain PyTorch these
are the gradients of the whole batch. With several ranks they are being averaged meanwhile, and each rank
keeps no more of the result than the update needs. So until a gradient is used, `param.grad` has a class whose
operations torch passes to this module. The first operation averages all gradients, whole, and then runs on
the result. Asking for a shape, a type or a device is not a use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from torch import Tensor

from hpcsgd import torch_private

Operand = TypeVar("Operand", bound=Tensor)
_ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "is_sparse",
)
_METHODS = (
    "size", "stride", "dim", "numel", "element_size", "is_contiguous", "is_floating_point", "is_complex",
    "is_conj", "is_neg",
)  # fmt: skip
_ABOUT: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES] + [getattr(Tensor, name) for name in _METHODS]
)
"""Attributes and methods that do not need a gradient's values."""


class PendingGradient(Tensor):
    """A gradient that is not averaged yet.

    A gradient becomes pending when its class is changed to this one in place. Once it has been averaged, its
    class is changed back.
    """

    use: Callable[[], Callable[[], None] | None]
    """A weak reference to the function that averages this gradient; the gradient's first use calls that."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Average the pending gradients among the operands of `func`, and then run it."""
        kwargs = kwargs or {}
        if func not in _ABOUT:
            for gradient in operands(PendingGradient, [*args, kwargs]):
                if (average := gradient.use()) is not None:
                    average()
        with torch_private.plainly():
            return func(*args, **kwargs)


def operands(kind: type[Operand], given: Iterable[object]) -> Iterator[Operand]:
    """Yield the tensors of class `kind` among a function's arguments, including those in lists and dicts."""
    for each in given:
        if isinstance(each, kind):
            yield each
        elif isinstance(each, list | tuple):
            yield from operands(kind, cast("list[object]", each))
        elif isinstance(each, dict):
            yield from operands(kind, cast("dict[object, object]", each).values())
