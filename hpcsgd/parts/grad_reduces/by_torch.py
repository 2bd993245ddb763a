"""The gradient reduction of an FSDP model (`fully_shard`), which torch does in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import GradReduce, ReduceContext
from hpcsgd.core.topology import Topology
from hpcsgd.core.traits import GradReduceTraits
from hpcsgd.errors import UserError


@dataclass(frozen=True)
class ByTorch:
    """The gradient reduction that does nothing, because FSDP has reduced the gradients in the backward pass.

    After that pass each rank has, for the rows of each parameter that it owns, the mean of the K ranks'
    gradients.
    """

    traits = GradReduceTraits(leaves_shards=True, per_bucket=True, keeps_gradients=False)

    def idle(self, topology: Topology) -> bool:
        return True

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        pass


@runtime_checkable
class Separable(Protocol):
    """A gradient reduction whose part inside the group torch can do instead."""

    def left_to_torch(self) -> GradReduce:
        """Return the reduction that remains after torch has reduced the gradients inside the group."""
        ...


def left_to_torch(grad_reduce: GradReduce) -> GradReduce:
    """Return what remains of `grad_reduce` after torch's reduction inside the group.

    Raises `UserError` if `grad_reduce` must process the group's gradients itself.
    """
    if isinstance(grad_reduce, Separable):
        return grad_reduce.left_to_torch()
    raise UserError(
        f"{type(grad_reduce).__name__}: torch shards the parameters and reduces the gradients of a group "
        "itself, unchanged: give a dense gradient reduction, or none"
    )
