"""Optimizers that train at a point between two iterates: Schedule-Free and generalized primal averaging.

    z   the raw iterate, which the optimizer's steps move        in its state, as `z`
    x   a running average of z, the model to evaluate            computed by `eval()`
    y   = β·x + (1 − β)·z, where gradients are computed          the parameters; `train()` returns to it

A. Defazio et al.: The Road Less Scheduled, 2024 (arXiv:2405.15682), with the package `schedulefree`; A.
Defazio et al.: Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs, 2025 (arXiv:2512.17131),
with the package `gpa`. Both call the raw iterate `z`, and `train_mode` says whether the parameters are y.

These maps are linear. So if groups average y and z, they average x as well. If they averaged y alone, each
would evaluate a different model: x = y + (1 − 1/β)·(z − y) with its own z.

`train()` of the packages computes y from x and z, with rounding errors. Here `eval()` keeps a copy of y, and
`train()` restores it bit for bit, unless the parameters were changed in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, optim

from hpcsgd.core.averager import Averager
from hpcsgd.core.method import Method
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import Topology
from hpcsgd.engine.chained import kind_of
from hpcsgd.engine.in_parts import step_without_hooks
from hpcsgd.engine.initial_state import ITERATE, KEPT, new_state
from hpcsgd.engine.inside import optimizers_in, own_methods
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers.optimizer_state import average_states

TRAIN, EVAL = "train", "eval"
FLAG = "train_mode"
"""The name, in a parameter group or in the state, of the flag that says that the parameters are y."""


def with_modes(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """Return those of `optimizer` and the optimizers inside it that have methods `train()` and `eval()`."""
    return [each for each in optimizers_in(optimizer) if {TRAIN, EVAL} <= set(own_methods(each))]


def is_iterate(name: str) -> bool:
    """Return whether optimizer state called `name` is a raw iterate, also in an optimizer inside another."""
    return name.rpartition(".")[2] == ITERATE


def is_like_parameter(name: str) -> bool:
    """Return whether state called `name` begins as a copy of the parameter: a raw iterate, or a kept y."""
    return name.rpartition(".")[2] in (ITERATE, KEPT)


def in_train_mode(optimizer: optim.Optimizer) -> bool | None:
    """Return whether the optimizer's flag says that it is in training mode; None if there is no flag."""
    places = [*optimizer.param_groups, *(optimizer.state.get(p, {}) for p in _parameters(optimizer))]
    found = [bool(place[FLAG]) for place in places if FLAG in place]
    return any(found) if found else None


def require_train_mode(optimizer: optim.Optimizer) -> None:
    """Call `step()` of each optimizer that is in evaluation mode, so that it raises its own error."""
    for each in with_modes(optimizer):
        if in_train_mode(each) is False:
            step_without_hooks(each)


def require_averaged(topology: Topology, method: Method, optimizer: optim.Optimizer, *, cut: bool) -> None:
    """Raise `UserError` if `method` would average only one of the two iterates of `optimizer`.

    `cut`: each rank updates parts of parameters.
    """
    found = with_modes(optimizer)
    if cut and any(FLAG in new_state(each) for each in found):
        raise UserError(
            f"{kind_of(found[0])} keeps {FLAG} and other numbers in the state of the first parameter of a "
            "group, which is not on all ranks if each updates a part: leave elementwise and tensorwise out"
        )
    if not found or topology.has_one_group:
        return
    kind, mean_of = kind_of(found[0]), method.averager.traits.mean_of
    if not mean_of:
        raise UserError(
            f"{kind} trains at a point between two iterates, and groups must average both; this method does "
            "not only average models: use one that sets all groups to the mean of their models, such as "
            "hierarchical or bsp"
        )
    if mean_of == "models" and not method.grad_reduce.traits.across:
        names = [name for each in found for name in new_state(each)]
        if ITERATE not in names:
            raise UserError(
                f"{kind} has train() and eval(), but no state called {ITERATE}, so it is not known what "
                f"groups must average with the parameters; its state is {', '.join(names) or 'empty'}: "
                "average all of it, by optimizer_state=hpcsgd.AverageState, or use bsp"
            )


def require_no_iterate_outside(optimizer: optim.Optimizer, known: bool) -> None:
    """Raise `UserError` if code around a `known` optimizer of torch keeps a raw iterate in its state."""
    if known and any(ITERATE in each for each in optimizer.state.values()):
        raise UserError(
            f"the state of {kind_of(optimizer)} has {ITERATE} of code around the DistributedOptimizer, such "
            "as ScheduleFreeWrapper, and groups would average only one of the two iterates: use an optimizer "
            "that has both inside, such as schedulefree.AdamWScheduleFree, or one group"
        )


def iterates(s: StepContext) -> dict[str, list[Tensor]]:
    """Return the raw iterates in the optimizer's state by name, once all buckets are updated.

    For a parameter that this group has never updated, z is the parameter itself. It must be read before the
    parameters are averaged.
    """
    return {name: zs for name, zs in s.optimizer_state.tensors().items() if is_iterate(name)}


def average_iterates(found: dict[str, list[Tensor]], s: StepContext, averager: Averager) -> None:
    """Average the raw iterates in `found`, after `averager` has averaged the parameters. Collective.

    This does nothing if the averager itself averages or resets all optimizer state.
    """
    if found and averager.traits.mean_of == "models":
        average_states(found, s)


def call_each(optimizers: Iterable[optim.Optimizer], name: str) -> None:
    """Call the method `name` of each of `optimizers`."""
    for each in optimizers:
        getattr(each, name)()


def exact(optimizer: optim.Optimizer, name: str) -> Callable[..., Any]:
    """Return the optimizer's method `name`; for `eval` and `train`, a version that preserves y exactly."""
    method = getattr(optimizer, name)
    if name not in (TRAIN, EVAL) or optimizer not in with_modes(optimizer):
        return method
    change = _to_train if name == TRAIN else _to_eval
    kind = type(optimizer)  # methods of the class, because those of the object are being replaced
    train, evaluate = (functools.partial(getattr(kind, each), optimizer) for each in (TRAIN, EVAL))
    return functools.wraps(method)(lambda: change(optimizer, train, evaluate))


@torch.no_grad()
def _to_eval(optimizer: optim.Optimizer, _: Callable[[], None], evaluate: Callable[[], None]) -> None:
    before = {p: p.clone() for p, state in _with_iterate(optimizer) if KEPT not in state}
    evaluate()
    if any(not torch.equal(p, y) for p, y in before.items()):  # the optimizer was in training mode
        for p, y in before.items():
            optimizer.state[p][KEPT] = y


@torch.no_grad()
def _to_train(optimizer: optim.Optimizer, train: Callable[[], None], evaluate: Callable[[], None]) -> None:
    """Set each parameter to the y that `eval()` kept, unless the parameter was changed since."""
    shown = {p: (p.clone(), state.pop(KEPT)) for p, state in _with_iterate(optimizer) if KEPT in state}
    train()
    if not shown:
        return
    computed = {p: p.clone() for p, _ in _with_iterate(optimizer)}
    for p, (_, y) in shown.items():
        p.copy_(y)
    evaluate()
    unchanged = {p: y for p, (x, y) in shown.items() if torch.equal(p, x)}
    train()
    for p, y in (computed | unchanged).items():
        p.copy_(y)


def _with_iterate(optimizer: optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield each parameter whose optimizer state has a raw iterate z, and that state."""
    for p in _parameters(optimizer):
        state = optimizer.state.get(p, {})
        if ITERATE in state:
            yield p, state


def _parameters(optimizer: optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
