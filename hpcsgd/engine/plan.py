"""The plan of a method's step, made once: the engine executes it, the cost model predicts its cost.

A method that switches to another one has a plan for each of the two (`StepPlan.sequence`). The engine
executes the plan of the switching method, whose parts act for the current one of the two. The cost model
adds up the costs of the plans in sequence.
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
    """What must be known of an optimizer to plan a step: which parts of the model it needs whole."""

    sees: Literal["elements", "tensors", "model"] = "elements"
    """What the optimizer has to see whole: an element, a tensor, or all of the model."""
    by_itself: bool = True
    """True if the optimizer's class is known to update elements or tensors separately, even if the user sets
    something else."""
    optimizer: str = "the optimizer"
    """The optimizer's name in messages."""
    has_iterate: bool = False
    """True if groups must average the raw iterate in the optimizer's state, too: see `engine/iterates.py`."""
    by_rows: bool = False
    """True if the optimizer has torch's Muon, and otherwise updates elements separately: hpcsgd can run it on
    rows of tensors."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a method, for one kind of optimizer and model."""

    grad_reduce: GradReduce
    """The method's gradient reduction, adapted to this optimizer and model."""
    schedule: Schedule
    averager: Averager
    sharding: Literal["elements", "tensors", "model", "rows"]
    """The units that shards may not cut. "rows": those of the tensors that torch has sharded (FSDP)."""
    update_per_bucket: bool
    """True if a bucket is updated while gradients of others are being reduced."""
    averages_iterate: bool
    """True if the raw iterate in the optimizer's state is averaged after the models."""
    decided_before_update: bool
    """True if it is known before the update whether groups average after it."""
    sequence: tuple[tuple[int | None, StepPlan], ...] = ()
    """For a method that switches to another one: the plan of each, with its last step. None: the step is not
    known in advance, or it is the last plan."""

    @classmethod
    def of(cls, method: Method, update: Update = Update(), *, by_torch: bool = False) -> StepPlan:
        """Plan a step of `method` for an optimizer with this `update`; `by_torch`: the model is FSDP's.

        Groups that are separate jobs may have different K, yet average models of one layout. So no rank owns
        whole tensors there.

        Raises:
            UserError: If the model is an FSDP model, and the optimizer or the reduction needs all of it.
        """
        grad_reduce, sharding, at_once = method.grad_reduce, update.sees, False
        if by_torch:
            grad_reduce, sharding = _in_rows(grad_reduce, update), "rows"
            at_once = update.by_rows  # one all-to-all has the rows of all matrices
        elif sharding == "tensors" and method.averager.traits.elastic:
            sharding = "model"
        if sharding == "model" and grad_reduce.traits.leaves_shards:
            grad_reduce = WithAllgather(grad_reduce)
        gradients_may_come_later = (
            grad_reduce.traits.per_bucket and not method.averager.traits.reads_gradients
        )
        plan = cls(
            grad_reduce=grad_reduce,
            schedule=method.schedule,
            averager=method.averager,
            sharding=sharding,
            update_per_bucket=update.by_itself and not at_once and gradients_may_come_later,
            averages_iterate=update.has_iterate and method.averager.traits.mean_of == "models",
            decided_before_update=method.schedule.traits.known_before_update,
        )
        stages = ((until, cls.of(each, update, by_torch=by_torch)) for until, each in method.sequence)
        return replace(plan, sequence=tuple((until, plan.carries_out(each)) for until, each in stages))

    def carries_out(self, stage: StepPlan) -> StepPlan:
        """Return `stage`, a plan of `sequence`, as the engine executes it.

        The engine is set up once, by this plan. So this plan decides what happens bucket by bucket.
        """
        return replace(
            stage,
            update_per_bucket=self.update_per_bucket,
            decided_before_update=self.decided_before_update,
        )

    def of_run(self, steps: int, after: int = 0) -> list[tuple[StepPlan, int]]:
        """Return the plans that a run uses, one after the other, each with its number of steps.

        Args:
            steps: Steps of the run, including those before this plan.
            after: Steps before this plan.

        Raises:
            UserError: If it is not known in advance when the method switches to another one.
        """
        found: list[tuple[StepPlan, int]] = []
        for until, stage in self.sequence[:-1]:
            if until is None:
                raise UserError(
                    'it is not known when this method switches to its second one (at = "first lr decay"): '
                    'plan each of the two separately, or give name = "switch" with at = a number of steps'
                )
            end = until if after < until < steps else steps  # a switch at a step that is over never happens
            found += stage.of_run(end, after)
            after = end
        last = self.sequence[-1][1] if self.sequence else None
        if after == steps:
            return found
        return [*found, *last.of_run(steps, after)] if last else [(self, steps - after)]

    @property
    def waits(self) -> Waits:
        """Which groups wait for which others; of a method that switches, in both stages and at the switch."""
        return waits_of(self.grad_reduce, self.schedule, self.averager)

    @property
    def quantizes_gather(self) -> QuantizedGather | None:
        """The gradient reduction if it replaces the allgather of shards, else None."""
        return quantized_gather(self.grad_reduce)

    @property
    def is_fsdp(self) -> bool:
        """True if torch has sharded the model (FSDP)."""
        return self.sharding == "rows"

    @property
    def divides_tensors(self) -> bool:
        """True if each rank of a group owns some tensors, and none of them is cut."""
        return self.sharding == "tensors" and self.grad_reduce.traits.leaves_shards

    @property
    def gather_per_bucket(self) -> bool:
        """True if a bucket is gathered while others are updated, in steps without averaging."""
        return self.update_per_bucket and self.decided_before_update and self.quantizes_gather is None

    def sync_rate(self, measured: float | None = None) -> float:
        """Return the share of steps after which groups average: the schedule's, or else `measured`.

        Raises:
            UserError: If the schedule has no fixed share and `measured` is None.
        """
        rate = self.schedule.traits.rate
        if rate is not None:
            return rate
        if measured is None:
            raise UserError(
                "how often the groups average depends on the gradients: give the share of steps, from a "
                "probe of delta or an earlier run"
            )
        return measured


def _in_rows(grad_reduce: GradReduce, update: Update) -> GradReduce:
    """Return the part of `grad_reduce` that is left to do if each rank has only rows of a tensor."""
    if update.sees != "elements" and not (update.sees == "tensors" and update.by_rows):
        raise UserError(
            f"parameters are sharded by torch, and {update.optimizer} is not known to update every "
            "element by itself: it would take rows for tensors (DistributedOptimizer(elementwise=True) if it "
            "does)"
        )
    return left_to_torch(grad_reduce)
