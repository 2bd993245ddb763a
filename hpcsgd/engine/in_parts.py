"""The optimizers that may update a part of the model separately, and how to run them on a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn, optim

from hpcsgd import torch_private
from hpcsgd.engine.chained import parts_of
from hpcsgd.engine.qhadam import QHAdam
from hpcsgd.errors import UserError

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD, QHAdam,
)  # fmt: skip
"""Optimizers whose update of an element depends on that element only, so that any cut of w is exact."""


TENSORWISE = tuple(getattr(optim, name) for name in ("Adafactor", "Muon") if hasattr(optim, name))
"""Optimizers, if this torch has them, whose update of a tensor depends on that whole tensor only."""


MUON = tuple(getattr(optim, name) for name in ("Muon",) if hasattr(optim, name))
"""torch's Muon, if this torch has it. hpcsgd can compute its update from rows of matrices."""


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return whether `optimizer` is known to update each element separately.

    A subclass of a known optimizer is not known, because it may use whole tensors.
    """
    return all(type(part) in ELEMENTWISE and not is_patched(part) for part in parts_of(optimizer))


def is_tensorwise(optimizer: optim.Optimizer) -> bool:
    """Return whether `optimizer` is known to update each tensor separately, and some of them as a whole."""
    known = [type(part) in ELEMENTWISE + TENSORWISE and not is_patched(part) for part in parts_of(optimizer)]
    return all(known) and not is_elementwise(optimizer)


def is_by_rows(optimizer: optim.Optimizer) -> bool:
    """Return whether hpcsgd can run `optimizer` if each rank of a group holds some rows of each tensor."""
    return all(type(part) in ELEMENTWISE + MUON and not is_patched(part) for part in parts_of(optimizer))


def is_patched(optimizer: optim.Optimizer) -> bool:
    """Return whether this object's `step` was replaced, other than by torch's schedulers."""
    own = vars(optimizer).get("step")
    return own is not None and not torch_private.is_by_scheduler(own)


def seen_whole(optimizer: optim.Optimizer) -> set[nn.Parameter]:
    """Return the parameters whose elements `optimizer` may not update one by one."""
    parts = [part for part in parts_of(optimizer) if not is_elementwise(part)]
    return {param for part in parts for group in part.param_groups for param in group["params"]}


def require_updated(optimizer: optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise `UserError` for a complex parameter of one of torch's optimizers that supports only real ones."""
    parts = [part for part in parts_of(optimizer) if type(part) in TENSORWISE]
    kinds = {p: type(part).__name__ for part in parts for group in part.param_groups for p in group["params"]}
    for name, param in named:
        if param.is_complex() and param in kinds:
            raise UserError(
                f"parameter {name} is of {param.dtype}, and {kinds[param]} updates no complex ones: give it "
                "to another optimizer, by hpcsgd.ChainedOptimizer"
            )


def step_without_hooks(optimizer: optim.Optimizer, *closure: Callable[[], Any]) -> Any:
    """Call the optimizer's `step()` as its class defines it, without hooks.

    All hooks, including those for every optimizer, run around the outer optimizer's `step()` instead, where
    parameters and gradients are whole.
    """
    step: Any = optimizer.step
    if is_patched(optimizer):
        return step(*closure)
    if "step" in vars(optimizer):
        torch_private.count_step(optimizer)
    while hasattr(step, "hooked"):  # torch's mark of a step() that calls hooks
        step = step.__wrapped__
    return step(optimizer, *closure)
