"""Collectives for scripts: means and sums of a script's metrics, the value of one rank, and a barrier.

A script may call them between `backward()` and `step()`, because each optimizer has its own communicators and
threads. `allreduce` and `broadcast` first check that all ranks make the same call with values of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hpcsgd.arguments import checked, shown
from hpcsgd.comm.backend import Reduction
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError

Value = TypeVar("Value")
Reduced = TypeVar("Reduced", int, float, Tensor)


@checked
def allreduce(x: Reduced, topology: Topology, op: Reduction = "mean") -> Reduced:
    """Return the mean, sum or maximum of `x` over all ranks.

    Use it for the metrics of a script, such as a loss or a count of hits. Every rank must call it. Elastic
    groups are jobs of their own: the ranks of other jobs do not count.

    Args:
        x: A number, or a tensor of one shape and dtype on all ranks. It is not changed.
        topology: The ranks, from `init`.
        op: "mean", "sum" or "max". Default 'mean'.

    Returns:
        The same on every rank: a number for a number, a new tensor without a gradient for a tensor. A mean of
        numbers is a float.

    Raises:
        UserError: If `op` is another word, if `x` is neither a number nor a tensor, if its dtype has no such
            reduction (a mean of integers), or if shapes or dtypes differ between ranks.

    Shape:
        Any shape; the result has the shape and dtype of `x`.

    Example:
        >>> hpcsgd.allreduce(2.5, topology)
        2.5
        >>> hpcsgd.allreduce(torch.ones(2), topology, op="sum")
        tensor([4., 4.])
    """
    _require_number_or_tensor(x)
    numbers = _gathered(f"allreduce, {op}", x, topology)
    if not isinstance(x, Tensor):
        return _of_numbers(numbers, op)
    result = x.detach().clone(memory_format=torch.contiguous_format)
    try:
        work = topology.world.allreduce(result, op)
    except ValueError as error:
        raise UserError(f"allreduce: {op} of x: {error}", key="x") from None
    work.wait()
    return result


@checked
def broadcast(x: Value, topology: Topology, root: int = 0) -> Value:
    """Return the `x` of rank `root` on every rank.

    Every rank must call it.

    Args:
        x: A tensor, of one shape and dtype on all ranks, or any value that can be pickled. It is not changed.
        topology: The ranks, from `init`.
        root: The rank whose value counts. Default 0.

    Returns:
        The value of rank `root`; a new tensor without a gradient for a tensor.

    Raises:
        UserError: If there is no rank `root`, or if shapes or dtypes differ between ranks.

    Example:
        >>> hpcsgd.broadcast({"seed": 7 + topology.rank}, topology)
        {'seed': 7}
    """
    if not 0 <= root < topology.world_size:
        raise UserError(
            f"root = {root}: the ranks are 0 to {topology.world_size - 1}", key="root", value=root
        )
    values = _gathered(
        f"broadcast from {root}", x if topology.rank == root or isinstance(x, Tensor) else None, topology
    )
    if not isinstance(x, Tensor):
        return values[root]
    result = x.detach().clone(memory_format=torch.contiguous_format)
    try:
        work = topology.world.bcast(result, root)
    except ValueError as error:
        raise UserError(f"broadcast: x: {error}", key="x") from None
    work.wait()
    return cast(Value, result)


@checked
def barrier(topology: Topology) -> None:
    """Return when every rank has called this function.

    Args:
        topology: The ranks, from `init`.

    Example:
        >>> hpcsgd.barrier(topology)
    """
    topology.world.barrier()


def _require_number_or_tensor(x: object) -> None:
    if not isinstance(x, Real | Tensor):
        raise UserError(f"allreduce: x = {shown(x)}: expected a number or a tensor", key="x")


def _gathered(call: str, x: object, topology: Topology) -> list[Any]:
    """Return the `x` of every rank (None for a tensor), or raise if ranks make different calls."""
    kind = f"a tensor {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else "no tensor"
    given = topology.world.gather_objects((call, kind, None if isinstance(x, Tensor) else x))
    for rank, (theirs, other, _) in enumerate(given):
        if (theirs, other) != given[0][:2]:
            raise UserError(
                f"{given[0][0]}: rank 0 gives {given[0][1]}, and rank {rank} calls {theirs} with {other}: "
                "make the same calls with the same shapes on all ranks"
            )
    return [value for *_, value in given]


def _of_numbers(xs: Sequence[Any], op: Reduction) -> Any:
    """Return the mean, sum or maximum of `xs`: an int for a sum or maximum of whole numbers, else a float."""
    if op != "mean" and all(isinstance(x, Integral) for x in xs):
        return int(sum(xs) if op == "sum" else max(xs))
    values = torch.tensor([float(x) for x in xs], dtype=torch.float64)
    return {"mean": values.mean, "sum": values.sum, "max": values.max}[op]().item()
