"""Predict the time, node hours and memory of a training by one method with P groups of K ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.machine import Machine
from hpcsgd.cost.memory import kept
from hpcsgd.cost.price import StepCost, over_run
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import UserError, count_text
from hpcsgd.performance.planning.candidates import Option, shapes
from hpcsgd.train.predicted import PricedPlan, priced_stages
from hpcsgd.train.training_profile import TrainingProfile


@dataclass(frozen=True)
class Estimate:
    """The predicted time, cost and memory of `option` on N = P·K ranks."""

    option: Option
    P: int
    K: int
    nodes: int
    plan: StepPlan
    sizes: ModelLayout
    step: StepCost
    """The cost of a step, as a mean over the run."""
    sequence: tuple[PricedPlan, ...]
    """The stages of the run: one, unless the method changes to another one."""
    steps_per_epoch: int
    epochs: float
    B: int
    memory: float
    """Bytes per rank for parameters, gradients, optimizer state and the method, without activations."""
    ranks_per_host: int
    one_node: float
    """Samples/s per rank in a job of one node."""

    @property
    def N(self) -> int:
        return self.P * self.K

    @property
    def samples_per_s(self) -> float:
        return self.P * self.B / self.step.seconds

    @property
    def epoch_seconds(self) -> float:
        return self.steps_per_epoch * self.step.seconds

    @property
    def epoch_interval(self) -> tuple[float, float]:
        return self.steps_per_epoch * self.step.low, self.steps_per_epoch * self.step.high

    @property
    def hours(self) -> float:
        """Hours of all epochs."""
        return self.epochs * self.epoch_seconds / 3600

    @property
    def node_hours(self) -> float:
        return self.nodes * self.hours

    @property
    def efficiency(self) -> float:
        """Samples/s per rank, as a share of those in a job of one node."""
        return self.samples_per_s / self.N / self.one_node


def estimate(
    subject: TrainingProfile,
    machine: Machine,
    option: Option,
    P: int,
    K: int,
    *,
    sync_rate: float | None,
    alone: float,
) -> Estimate:
    """Return the estimate of `option` with P groups of K ranks.

    Raises `UserError` if the method's cost cannot be predicted, or if the machine lacks a measurement.
    """
    plan = subject.plan(subject.method(option.table, P))
    m = subject.sizes(P, K, machine.ranks_per_host, plan)
    steps = subject.steps_per_epoch(P)
    if steps < 1:
        raise UserError(
            f"{count_text(subject.samples, 'sample')} are not one batch of {subject.B} for each of "
            f"{count_text(P, 'group')}"
        )
    stages = priced_stages(subject, plan, m, machine, sync_rate)
    return Estimate(
        option=option,
        P=P,
        K=K,
        nodes=-(-P * K // machine.ranks_per_host),
        plan=plan,
        sizes=m,
        step=over_run([(stage.step, stage.steps) for stage in stages]),
        sequence=stages,
        steps_per_epoch=steps,
        epochs=subject.epochs(P),
        B=subject.B,
        memory=kept(stages[0].plan, m, subject.state, *(stage.plan for stage in stages[1:])),
        ranks_per_host=min(machine.ranks_per_host, P * K),
        one_node=alone,
    )


def one_node(subject: TrainingProfile, machine: Machine, most_groups: int | None = None) -> float:
    """Return the samples/s per rank of a job on one node with `bsp`, with the fastest P and K.

    Raises `UserError` if no groups of a node's ranks can share a batch.
    """
    R, option = machine.ranks_per_host, Option({"name": "bsp"})
    found = [
        estimate(subject, machine, option, P, K, sync_rate=None, alone=1.0).samples_per_s / R
        for P, K in shapes(R, subject.B, most_groups)
    ]
    if not found:
        raise UserError(f"no groups of a node's {R} ranks can share batches of {subject.B}")
    return max(found)
