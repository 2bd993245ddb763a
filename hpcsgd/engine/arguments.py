"""Whether what a script gives `DistributedOptimizer` is of the kinds that it takes, in their order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from types import FunctionType
from typing import Any, cast

from torch import nn, optim

from hpcsgd.core.topology import Job
from hpcsgd.errors import UserError, shortened
from hpcsgd.methods import METHODS, Method

IN_ORDER = "DistributedOptimizer(optimizer, model, job, method)"


def of_their_kinds(optimizer: object, model: object, job: object, method: object) -> Job:
    """Return `job`, if each argument is what its name says; collective. Raises `UserError`."""
    if not isinstance(job, Job):
        if isinstance(method, Job):
            raise UserError(f"job and method are swapped: expected {IN_ORDER}")
        raise UserError(f"job = {shown(job)}: expected what hpcsgd.init(groups=…) returns")
    with job.together("wrapping the optimizer"):
        _require_optimizer(optimizer, model)
        if not isinstance(model, nn.Module):
            raise UserError(f"model = {shown(model)}: expected the torch.nn.Module itself")
        if not isinstance(method, Method):
            raise UserError(f"method = {shown(method)}: {_expected(method)}")
    return job


def shown(value: object) -> str:
    """What was given, in some words."""
    if isinstance(value, type | FunctionType):
        return value.__name__
    if value is None or isinstance(value, str | int | float):
        return shortened(repr(value))
    return f"an object of type {type(value).__name__}"


def _require_optimizer(optimizer: object, model: object) -> None:
    """What is none of torch's may be meant to go around one: that is told by `trained_parameters`."""
    if isinstance(optimizer, nn.Module) and isinstance(model, optim.Optimizer):
        raise UserError(f"optimizer and model are swapped: expected {IN_ORDER}")
    if optimizer is None or isinstance(optimizer, type | FunctionType | str | nn.Module):
        raise UserError(
            f"optimizer = {shown(optimizer)}: expected a torch optimizer that has been made, as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )


def _expected(method: object) -> str:
    """A method, and the call that makes the one whose name or function was given."""
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    close = get_close_matches(name.lower().replace("-", "_"), METHODS, n=1)
    if close:
        return f"expected a method, which a call makes: did you mean hpcsgd.{_call(close[0])}?"
    return f"expected a method, as hpcsgd.{_call('hierarchical')}; allowed: {', '.join(sorted(METHODS))}"


def _call(name: str) -> str:
    """``hierarchical(every=…)``, with the arguments that it needs."""
    parameters = inspect.signature(cast("Callable[..., Any]", METHODS[name])).parameters.values()
    needed = [f"{p.name}=…" for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return f"{name}({', '.join(needed)})"
