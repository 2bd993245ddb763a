"""How a step of a method goes, decided once: the engine carries the plan out, the cost model prices it.

A method that changes to another one has a plan for each of them (`StepPlan.stages`). The engine carries out
the plan of the whole, whose parts act for the method whose turn it is; the cost model prices the stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hpcsgd.core.averager import Averager
from hpcsgd.core.method import Method, waits_of
from hpcsgd.core.step import GradReduce, QuantizedGather, Schedule, quantized_gather
from hpcsgd.core.waits import Waits
from hpcsgd.errors import UserError
from hpcsgd.parts.grad_reduces import WithAllgather
from hpcsgd.parts.grad_reduces.by_torch import left_to_torch


@dataclass(frozen=True, slots=True)
class Update:
    """How an optimizer updates a model."""

    sees: Literal["elements", "tensors", "model"] = "elements"
    """What it has to see whole: no more than an element, a tensor, or all of the model."""
    by_itself: bool = True
    """Whether its class is known to update each element or each tensor by itself, whatever the user says."""
    optimizer: str = "the optimizer"
    """What to call it."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a method, for one kind of optimizer and model."""

    grad_reduce: GradReduce
    """The method's, as it has to be for this optimizer and model."""
    schedule: Schedule
    averager: Averager
    sharding: Literal["elements", "tensors", "model", "rows"]
    """What the positions of a group may not cut when they divide the model; rows: torch has divided it."""
    update_per_bucket: bool
    """Whether a bucket is updated while gradients of others are on their way."""
    decided_before_update: bool
    """Whether it is known before the update if groups average after it."""
    sequence: tuple[tuple[int | None, StepPlan], ...] = ()
    """Of a method that changes to another one: the plan of each, with its last step; None: nobody can tell
    beforehand, or it is the last one."""

    @classmethod
    def of(cls, method: Method, update: Update = Update(), *, by_torch: bool = False) -> StepPlan:
        """Plan a step of `method` for an optimizer that makes such an `update`; `by_torch`: of a model that
        torch has sharded over the group.

        Groups that are jobs of their own may be of several K, and average models that are laid out alike:
        there nobody owns tensors.

        Raises:
            UserError: If torch has sharded the model, and the optimizer or the exchange needs all of it.
        """
        exchange, sharding = method.grad_reduce, update.sees
        if by_torch:
            exchange, sharding = _in_rows(exchange, update), "rows"
        elif sharding == "tensors" and method.averager.traits.elastic:
            sharding = "model"
        if sharding == "model" and exchange.traits.shards:
            exchange = WithAllgather(exchange)
        gradients_may_come_later = exchange.traits.per_bucket and not method.averager.traits.reads_gradients
        plan = cls(
            grad_reduce=exchange,
            schedule=method.schedule,
            averager=method.averager,
            sharding=sharding,
            update_per_bucket=update.by_itself and gradients_may_come_later,
            decided_before_update=method.schedule.traits.known_before_update,
        )
        stages = ((until, cls.of(each, update, by_torch=by_torch)) for until, each in method.sequence)
        return replace(plan, sequence=tuple((until, plan.carries_out(each)) for until, each in stages))

    def carries_out(self, stage: StepPlan) -> StepPlan:
        """Return a stage as the engine carries it out: this plan says what is done bucket by bucket."""
        return replace(
            stage,
            update_per_bucket=self.update_per_bucket,
            decided_before_update=self.decided_before_update,
        )

    def of_run(self, steps: int, after: int = 0) -> list[tuple[StepPlan, int]]:
        """Return the plans that a run goes by, one after the other, each with how many steps it is for.

        Args:
            steps: of the run, those before this plan among them.
            after: how many are made before this plan.

        Raises:
            UserError: If nobody can tell beforehand when the method changes to another one.
        """
        found: list[tuple[StepPlan, int]] = []
        for until, stage in self.sequence[:-1]:
            if until is None:
                raise UserError(
                    'nobody can tell when this method changes to its second one (at = "first lr decay"): '
                    'plan each of the two by itself, or give name = "switch" with at = a number of steps'
                )
            end = until if after < until < steps else steps  # a change whose step is over never comes
            found += stage.of_run(end, after)
            after = end
        last = self.sequence[-1][1] if self.sequence else None
        if after == steps:
            return found
        return [*found, *last.of_run(steps, after)] if last else [(self, steps - after)]

    @property
    def waits(self) -> Waits:
        """Who waits for whom. Of a method that changes to another one: of both, and when it changes."""
        return waits_of(self.grad_reduce, self.schedule, self.averager)

    @property
    def quantizes_gather(self) -> QuantizedGather | None:
        """What makes one model of the positions' chunks, where that is no plain allgather."""
        return quantized_gather(self.grad_reduce)

    @property
    def divides_tensors(self) -> bool:
        """Whether each position owns some tensors, and none of them is cut."""
        return self.sharding == "tensors" and self.grad_reduce.traits.shards

    @property
    def gather_per_bucket(self) -> bool:
        """Whether a bucket is gathered while others are updated, in steps after which nobody averages."""
        return self.update_per_bucket and self.decided_before_update and self.quantizes_gather is None

    def sync_rate(self, measured: float | None = None) -> float:
        """Return the share of steps after which groups average; `measured` where the schedule cannot tell.

        Raises:
            UserError: If it cannot, and nobody has measured it.
        """
        rate = self.schedule.traits.rate
        if rate is not None:
            return rate
        if measured is None:
            raise UserError(
                "how often the groups meet depends on the gradients: say the share of steps, from a probe of "
                "delta or an earlier run"
            )
        return measured


def _in_rows(exchange: GradReduce, update: Update) -> GradReduce:
    """Return what is left of `exchange` where each position has no more than rows of a tensor."""
    if update.sees != "elements":
        raise UserError(
            f"parameters are sharded by torch, and {update.optimizer} is not known to update every "
            "element by itself: it would take rows for tensors (DistributedOptimizer(elementwise=True) if it "
            "does)"
        )
    return left_to_torch(exchange)
