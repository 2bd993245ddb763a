"""Weights whose gather still runs when a step returns: the first use of one waits for its bucket.

Until then a parameter has a class of its own, whose operations torch passes to this module first. So it does
not matter how a weight is read: modules, methods of the model, a norm, `state_dict()` and `detach()` all get
its new value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn

from hpcsgd import torch_private
from hpcsgd.comm import Work, phase
from hpcsgd.core.flat import Bucket
from hpcsgd.core.fsdp import is_fsdp
from hpcsgd.core.pending_gradient import operands
from hpcsgd.errors import UserError

_GRAD: Any = Tensor.grad
_ABOUT: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("grad", "requires_grad", "shape", "dtype", "device")),
    *(_GRAD.__set__, _GRAD.__delete__),
}
"""Operations that do not need a parameter's values, so that `zero_grad()` does not wait."""


class PendingParams:
    """The buckets whose gather continues after a step; if not `wanted`, there are none."""

    def __init__(self, model: nn.Module, wanted: bool) -> None:
        if wanted:
            if any(is_fsdp(param) for param in model.parameters()):
                raise UserError(
                    "overlap_param_gather: torch has sharded the model, and gathers it itself: leave one out"
                )
            _require_interpreted(model)
            for module in model.modules():  # for extensions in C++ that operate on their own weights
                module.register_forward_pre_hook(_wait_for_own)
        self.enabled = wanted
        self._under_way: list[_PendingParam] = []

    def begin(self, works: Mapping[Bucket, Work]) -> None:
        """Let the gathers `works` continue after the step; the first use of a weight waits for its bucket."""
        self._under_way = [_PendingParam(b, work) for b, work in works.items()]

    def finish(self) -> None:
        """Return once all gathers are done."""
        for arrival in self._under_way:
            arrival.finish()
        self._under_way = []


class _PendingParam:
    """The gather of one bucket, for which its parameters wait at their first use."""

    def __init__(self, b: Bucket, work: Work) -> None:
        self._params = [slot.param for slot in b.slots]
        self._work = work
        if any(type(param) is not nn.Parameter for param in self._params):
            work.wait()  # the class of a parameter is not ours to replace
            self._params = []
        for param in self._params:
            torch_private.become(param, _LazyParameter)
            param.pending = self  # type: ignore[attr-defined]

    def finish(self) -> None:
        if self._params:
            with phase("param_gather"):
                self._work.wait()
        for param in self._params:
            torch_private.become(param, nn.Parameter)
            del param.pending  # type: ignore[attr-defined]
        self._params = []


class _LazyParameter(nn.Parameter):
    pending: _PendingParam

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in _ABOUT:
            plain = cast("Callable[..., object]", super().__torch_function__)  # pyright: ignore[reportUnknownMemberType]
            return plain(func, types, args, kwargs or {})
        for arrival in _pending_of([*args, kwargs]):
            arrival.finish()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        self.pending.finish()
        return self.__deepcopy__(memo)  # now the method of nn.Parameter


def _wait_for_own(module: nn.Module, _: object) -> None:
    for arrival in _pending_of(module.parameters(recurse=False)):
        arrival.finish()


def _pending_of(given: Iterable[object]) -> Iterator[_PendingParam]:
    """Yield the pending gathers of parameters among a function's arguments, also in lists and dicts."""
    return (param.pending for param in operands(_LazyParameter, given))


def _require_interpreted(model: nn.Module) -> None:
    """Raise `UserError` for compiled modules, which read weights directly or would be compiled again."""
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if torch_private.is_compiled(module) or "ScriptModule" in type(module).__name__:
            raise UserError(
                f"overlap_param_gather: {name or 'the model'} is compiled, and compiled code does not wait "
                "for weights: leave one of them out"
            )
