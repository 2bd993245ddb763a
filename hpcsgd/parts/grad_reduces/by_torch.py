"""Where torch shards a model over the group (`fully_shard`) it exchanges the group's gradients, too."""

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
    """Nothing is left to do: the backward pass ends with the mean of the K gradients, of the own rows."""

    traits = GradReduceTraits(shards=True, per_bucket=True, keeps_gradients=False)

    def idle(self, topology: Topology) -> bool:
        return True

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        pass


@runtime_checkable
class Separable(Protocol):
    """An exchange of which torch may do what is inside a group."""

    def left_to_torch(self) -> GradReduce:
        """What there is to do beside that."""
        ...


def left_to_torch(exchange: GradReduce) -> GradReduce:
    """Raises `UserError` where gradients would have to pass through it inside a group."""
    if isinstance(exchange, Separable):
        return exchange.left_to_torch()
    raise UserError(
        f"{type(exchange).__name__}: parameters are sharded by torch, which exchanges the gradients of a "
        "group itself, all of them as they are: give a dense exchange, or none"
    )
