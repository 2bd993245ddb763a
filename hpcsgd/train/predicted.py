"""Predict, from a machine file, the seconds of a step with each setting of gradient communication."""

from __future__ import annotations

import itertools
from pathlib import Path

from hpcsgd.config.schema import Config
from hpcsgd.cost import machine as machines
from hpcsgd.cost.machine import measured
from hpcsgd.cost.price import StepCost, computed, over_run, price
from hpcsgd.train.reduce_settings import ReduceSettings, left_open
from hpcsgd.train.training_profile import profile_of, require_same_model


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
        sending = ReduceSettings(*way)
        chosen = subject.with_config(sending.within(config))
        plan = chosen.plan(chosen.own_method(P))
        m = chosen.sizes(P, K, ranks_per_host, plan)
        costs: list[tuple[StepCost, int]] = []
        for stage, steps in plan.of_run(chosen.steps(P)):
            own = computed(stage, m, measured(machine), chosen.B / K)
            cost = price(
                stage, m, machine, own, ranks_per_host=ranks_per_host,
                overlap=sending.overlap, prefetch=config.training.overlap_param_gather,
                broadcast=subject.broadcast,
            )  # fmt: skip
            costs.append((cost, steps))
        found[sending] = over_run(costs).seconds
    return found
