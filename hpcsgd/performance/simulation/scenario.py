"""Read a simulation from a scenario, a TOML file. The names of keys for times end with the unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hpcsgd.config.kinds import Above, Minimum
from hpcsgd.config.overrides import overlay
from hpcsgd.config.parts import Parts
from hpcsgd.config.reader import read_section, read_toml
from hpcsgd.core.waits import Waits
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import in_file, in_section
from hpcsgd.performance.simulation.compute import DISTRIBUTIONS, STRAGGLERS, Distribution, Stragglers
from hpcsgd.performance.simulation.durations import Durations, Layout, Message
from hpcsgd.performance.simulation.failures import Failures
from hpcsgd.performance.simulation.rules import rule_of
from hpcsgd.performance.simulation.simulate import Simulation
from hpcsgd.train.families import method_of

Count = Annotated[int, Minimum(1)]
Seconds = Annotated[float, Minimum(0)]
Time = Annotated[float, Above(0)]
HOUR = 3600.0
PARTS = Parts({Distribution: DISTRIBUTIONS, Stragglers: STRAGGLERS}, steps_per_epoch=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection:
    """The groups, ranks and steps of the job."""

    groups: Count
    group_size: Count = 1
    ranks_per_host: Count = 1
    batch_size: Count = 1  # samples of one GROUP per step
    steps: Count = 1000
    steps_per_epoch: Count | None = None  # for methods that count epochs, and for `ensemble_sync`


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesSection:
    """Seconds of each part of a step if all participants begin at once."""

    grad_reduce_seconds: Seconds = 0.0
    update_seconds: Seconds = 0.0
    model_average_seconds: Seconds = 0.0
    gather_seconds: Seconds = 0.0
    latency_seconds: Seconds = 0.0  # from the end of sending to the arrival
    link_seconds: Seconds = 0.0  # a message occupies its host's link so long


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresSection:
    """Failures of nodes and of single ranks."""

    mtbf_hours_per_node: Time
    mtbf_hours_per_rank: Time | None = None  # none: it fails only with its node
    checkpoint_seconds: Time
    restart_seconds: Seconds = 0.0
    work_hours: Time = 24.0  # duration of the training without failures
    checkpoint_every_seconds: Time | None = None  # none: the best interval
    heartbeat_timeout_seconds: Seconds = (
        10.0  # for `ensemble_sync`: how long the others wait for a group that has died
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The content of a scenario file. A section with a `name` also has arguments, for the part named."""

    seed: Annotated[int, Minimum(0)] = 1
    job: JobSection
    compute: dict[str, Any]
    stragglers: dict[str, Any] | None = None
    messages: MessagesSection = field(default_factory=MessagesSection)
    method: dict[str, Any]
    failures: FailuresSection | None = None


def load(path: Path, overrides: Sequence[str] = ()) -> Simulation:
    """Read a TOML file, apply ``--section.key value`` overrides and check everything.

    Raises a one-line `UserError` that has the value given, the values allowed, and the flag or the file and
    key.
    """
    table = read_toml(path)
    overlay(table, overrides)
    scenario = read_section(Scenario, table, path)
    job, m = scenario.job, scenario.messages
    with in_file(path):
        return Simulation(
            layout=Layout(job.groups, job.group_size, job.ranks_per_host),
            compute=PARTS.make(Distribution, scenario.compute, "compute"),
            stragglers=_stragglers(scenario),
            durations=Durations(
                grad_reduce=m.grad_reduce_seconds,
                update=m.update_seconds,
                model_average=m.model_average_seconds,
                gather=m.gather_seconds,
                message=Message(m.latency_seconds, m.link_seconds),
            ),
            waits=_waits(scenario),
            steps=job.steps,
            failures=_failures(scenario.failures),
            batch_size=job.batch_size,
            steps_per_epoch=job.steps_per_epoch,
            seed=scenario.seed,
        )


def _waits(scenario: Scenario) -> Waits:
    waits = StepPlan.of(method_of(scenario.method, scenario.job.steps_per_epoch, scenario.job.steps)).waits
    with in_section("method"):
        rule_of(waits)
    return waits


def _stragglers(scenario: Scenario) -> Stragglers | None:
    if scenario.stragglers is None:
        return None
    return PARTS.make(Stragglers, scenario.stragglers, "stragglers")


def _failures(section: FailuresSection | None) -> Failures | None:
    if section is None:
        return None
    return Failures(
        mtbf_seconds=section.mtbf_hours_per_node * HOUR,
        checkpoint_seconds=section.checkpoint_seconds,
        restart_seconds=section.restart_seconds,
        work_seconds=section.work_hours * HOUR,
        interval_seconds=section.checkpoint_every_seconds,
        heartbeat_timeout_seconds=section.heartbeat_timeout_seconds,
        rank_mtbf_seconds=None if section.mtbf_hours_per_rank is None else section.mtbf_hours_per_rank * HOUR,
    )
