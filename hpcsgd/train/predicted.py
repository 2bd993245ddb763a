"""Predict, from a machine file, the cost of a step, and how its seconds depend on the reduction settings."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from hpcsgd.config.schema import Config
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost import machine as machines
from hpcsgd.cost.machine import Machine, measured
from hpcsgd.cost.price import StepCost, computed, over_run, price
from hpcsgd.engine.plan import StepPlan
from hpcsgd.train.reduce_settings import ReduceSettings, left_open
from hpcsgd.train.training_profile import TrainingProfile, profile_of, require_same_model


@dataclass(frozen=True)
class PricedPlan:
    """One stage of a run: its plan, the number of its steps, and the cost of one step."""

    plan: StepPlan
    steps: int
    step: StepCost


def priced_stages(
    subject: TrainingProfile,
    plan: StepPlan,
    m: ModelLayout,
    machine: Machine,
    sync_rate: float | None = None,
) -> tuple[PricedPlan, ...]:
    """Return the stages of a run by `plan`: one, unless the method changes to another one.

    `m`: the model's layout under `plan`. `sync_rate`: see `hpcsgd.cost.traffic.of_step`. Raises `UserError`
    if the cost of the method cannot be predicted, or if the machine lacks a measurement.
    """
    compute, training = measured(machine), subject.config.training

    def cost(stage: StepPlan) -> StepCost:
        return price(
            stage, m, machine, computed(stage, m, compute, subject.B / m.K),
            ranks_per_host=m.ranks_per_host, sync_rate=sync_rate,
            overlap=training.overlap_grad_reduce is not False, prefetch=training.overlap_param_gather,
            broadcast=subject.broadcast,
        )  # fmt: skip

    return tuple(PricedPlan(stage, steps, cost(stage)) for stage, steps in plan.of_run(subject.steps(m.P)))


def predicted(config: Config, P: int, K: int, file: Path, ranks_per_host: int) -> dict[ReduceSettings, float]:
    """Return the predicted seconds of a step for each combination of settings that `config` leaves open.

    The job has P groups of K ranks. Raises `UserError` if the machine file `file` has no measurements of the
    job's links or model, or if the cost of the job's method is unknown.
    """
    machine, subject = machines.load(file), profile_of(config)
    require_same_model(subject, machine, file)
    choices = left_open(config, K)
    found: dict[ReduceSettings, float] = {}
    for way in itertools.product(choices.sizes, choices.overlaps, choices.grad_reduces):
        settings = ReduceSettings(*way)
        chosen = subject.with_config(settings.within(config))
        plan = chosen.plan(chosen.own_method(P))
        m = chosen.sizes(P, K, ranks_per_host, plan)
        stages = priced_stages(chosen, plan, m, machine)
        found[settings] = over_run([(stage.step, stage.steps) for stage in stages]).seconds
    return found
