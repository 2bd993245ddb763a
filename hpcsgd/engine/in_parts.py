"""Which optimizers may update a part of the model by itself, and how: they know the tensors of that alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn, optim

from hpcsgd.engine.joined import parts_of

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Optimizers whose update of an element depends on that element alone, so that any cut of w is exact."""


TENSORWISE = tuple(getattr(optim, name) for name in ("Adafactor", "Muon") if hasattr(optim, name))
"""Those, of this torch, whose update of a tensor depends on that tensor alone, all of it."""


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Known to be: an unknown optimizer, or a subclass of a known one, may look at whole tensors."""
    return all(type(part) in ELEMENTWISE for part in parts_of(optimizer))


def is_tensorwise(optimizer: optim.Optimizer) -> bool:
    """Known to look at each tensor by itself, and at some as a whole."""
    kinds = [type(part) for part in parts_of(optimizer)]
    return all(kind in ELEMENTWISE + TENSORWISE for kind in kinds) and not is_elementwise(optimizer)


def seen_whole(optimizer: optim.Optimizer) -> set[nn.Parameter]:
    """The parameters whose elements it may not update each by itself."""
    parts = [part for part in parts_of(optimizer) if not is_elementwise(part)]
    return {param for part in parts for group in part.param_groups for param in group["params"]}


HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
"""Where torch keeps what is called before and after `step()`."""


def hooks_around_step(optimizer: optim.Optimizer) -> list[Callable[..., object]]:
    """Those of this optimizer and of all: in parts they would be called for each, and see one at a time."""
    of_all: Any = sys.modules[optim.Optimizer.__module__]
    places: list[tuple[Any, str]] = [(of_all, name) for name in HOOKS_OF_ALL]
    places += [(each, name) for each in {optimizer, *parts_of(optimizer)} for name in HOOKS]
    kept: list[Mapping[int, Callable[..., object]]] = [getattr(where, name, {}) for where, name in places]
    return [hook for hooks in kept for hook in hooks.values()]
