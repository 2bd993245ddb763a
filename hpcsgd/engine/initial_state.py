"""The initial state of an optimizer: that of a new one, and that of parameters it has never updated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from hpcsgd.core.fsdp import local
from hpcsgd.engine.chained import ChainedOptimizer, parts_of
from hpcsgd.errors import UserError

NUMBERS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "step": lambda group: 0.0,
    "eta": lambda group: float(group["lr"]),
    "mu": lambda group: 1.0,
    "mu_product": lambda group: 1.0,
}
"""Names of state that is one number for a whole parameter, not one per element. Each function returns the
number with which torch's optimizers start, given the parameter group."""


ITERATE = "z"
"""The name of the raw iterate in optimizer state, which starts as a copy of the parameter; see `iterates`."""
KEPT = "y"
"""The name, in the state, of the parameters to which `train()` returns, while an optimizer is in eval mode;
see `iterates`."""


def like_new(optimizer: optim.Optimizer, params: Iterable[Sequence[Tensor]]) -> optim.Optimizer:
    """Return a new optimizer of the same kind and options for other tensors.

    `params`: the tensors of each parameter group. Raises `UserError` if the class needs arguments that are
    not in the optimizer's `defaults`.
    """
    if isinstance(optimizer, ChainedOptimizer):
        rest = iter(params)
        theirs = [(part, [next(rest) for _ in part.param_groups]) for part in optimizer.parts]
        return ChainedOptimizer(*(like_new(part, own) for part, own in theirs if any(own)))
    groups = [{**g, "params": list(own)} for g, own in zip(optimizer.param_groups, params, strict=True)]
    return _made(optimizer, [group for group in groups if group["params"]])


def start_counters(optimizer: optim.Optimizer) -> None:
    """Reset numbers that the optimizer keeps in its parameter groups, such as `k` and `d` of Prodigy.

    These are numbers that the optimizer sets itself and that its constructor does not take.
    """
    for part in parts_of(optimizer):
        takes = _arguments(part)
        groups = [group for group in part.param_groups if group["params"]]
        fresh = _made(
            part,
            [
                {key: value for key, value in group.items() if key in takes}
                | {"params": [_at_rest(local(group["params"][0]))]}
                for group in groups
            ],
        )
        starts = [
            {key: value for key, value in group.items() if key not in takes} for group in fresh.param_groups
        ]
        step_at_rest(fresh)
        for group, start, later in zip(groups, starts, fresh.param_groups, strict=True):
            for key in later.keys() - takes - start.keys():  # keys that the first step sets
                group.pop(key, None)
            group.update({key: value for key, value in start.items() if _counts(value)})


def _made(optimizer: optim.Optimizer, groups: Sequence[dict[str, Any]]) -> optim.Optimizer:
    """Return a new optimizer of the same kind and options, over parameter `groups`."""
    kind = type(optimizer)
    takes = inspect.signature(kind).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in takes}
    try:
        return kind(list(groups), **options)
    except Exception as error:
        raise UserError(f"a new {kind.__name__} cannot be made from its defaults: {error}") from error


def _arguments(optimizer: optim.Optimizer) -> set[str]:
    """Return the argument names of the optimizer's constructor and of those of its base classes."""
    kinds: Sequence[Any] = type(optimizer).__mro__
    return {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}


def _counts(value: object) -> bool:
    number = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
    return number and not isinstance(value, bool)


def step_at_rest(fresh: optim.Optimizer) -> None:
    """Make a step of an optimizer whose tensors are from `_at_rest`, in training mode if it has modes."""

    def closure() -> Tensor:
        for param in (param for group in fresh.param_groups for param in group["params"]):
            param.grad = torch.zeros_like(param)
        return torch.zeros(())

    if (train := getattr(fresh, "train", None)) is not None:
        train()
    step: Any = fresh.step
    try:
        step(closure) if "closure" in inspect.signature(step).parameters else step()
    except Exception as error:
        raise UserError(
            f"the state of a new {type(fresh).__name__} is not known: with gradients of zero its step fails: "
            f"{error}"
        ) from error


def complete(optimizer: optim.Optimizer, tensors: Iterable[Tensor]) -> None:
    """Set the state of those of `tensors` that have none to the optimizer's initial state.

    This is the state of a new optimizer after a step that changes nothing, with its counters reset.
    """
    wanted = _without_iterate(optimizer).intersection(tensors)
    wanted |= {x for x in tensors if not optimizer.state.get(x)}
    if not wanted:
        return
    missing = [[x for x in group["params"] if x in wanted] for group in optimizer.param_groups]
    still = [[_at_rest(x) for x in xs] for xs in missing]
    fresh = like_new(optimizer, still)
    step_at_rest(fresh)
    for group, xs, stand_ins in zip(optimizer.param_groups, missing, still, strict=True):
        for x, stand_in in zip(xs, stand_ins, strict=True):
            if state := fresh.state.get(stand_in):
                if ITERATE in state:
                    state[ITERATE].copy_(x)
                _set_back(state, group)
                optimizer.state[x] = {**state, **optimizer.state.get(x, {})}


def _without_iterate(optimizer: optim.Optimizer) -> set[Tensor]:
    """Return tensors without a raw iterate, although the optimizer's other tensors have one.

    The package `gpa` keeps numbers in the state of a group's first parameter, also before its first gradient.
    """
    found: set[Tensor] = set()
    for part in parts_of(optimizer):
        own = [x for group in part.param_groups for x in group["params"]]
        having = {x for x in own if ITERATE in optimizer.state.get(x, {})}
        found |= {x for x in own if having and x not in having}
    return found


def new_state(optimizer: optim.Optimizer) -> list[str]:
    """Return the names of the state that `optimizer` keeps for a parameter after its first update."""
    trained = [[x for x in group["params"] if x.requires_grad][:1] for group in optimizer.param_groups]
    fresh = like_new(optimizer, [[_at_rest(local(x)) for x in xs] for xs in trained])
    step_at_rest(fresh)
    return list(dict.fromkeys(name for state in fresh.state.values() for name in state))


def _set_back(state: dict[str, Any], group: Mapping[str, Any]) -> None:
    for name, start in NUMBERS.items():
        number = state.get(name)
        if isinstance(number, Tensor) and number.dim() == 0:
            number.fill_(start(group))
        elif isinstance(number, int | float):
            state[name] = type(number)(start(group))


def _at_rest(x: Tensor) -> Tensor:
    """Return zeros like `x` with a gradient of zeros, so that not even weight decay changes them."""
    stand_in = torch.zeros_like(x, requires_grad=False)
    stand_in.grad = torch.zeros_like(x, requires_grad=False)
    return stand_in


def has_every_element(name: str, value: Any, tensor: Tensor) -> bool:
    """Return whether a `value` of the state has an entry for each element of `tensor`."""
    alike = isinstance(value, Tensor) and value.shape == tensor.shape
    return alike and (tensor.dim() > 0 or name not in NUMBERS)


def like(param: Tensor, value: Tensor) -> Tensor:
    """Return an empty tensor with the shape and strides of `param` and the dtype of `value`."""
    return torch.empty_strided(param.size(), param.stride(), dtype=value.dtype, device=value.device)


def in_memory_order(value: Tensor, param: Tensor) -> Tensor:
    """Return `value`, which has the shape of `param`, as a vector in the memory order of `param`."""
    if value.stride() != param.stride():
        value = like(param, value).copy_(value)
    return value.as_strided((param.numel(),), (1,))
