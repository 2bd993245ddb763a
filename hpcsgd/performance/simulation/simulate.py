"""A job from its durations: how fast it is, and who waits for what."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsgd.core.waits import Waits
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation.compute import Compute, Distribution, Stragglers
from hpcsgd.performance.simulation.durations import Durations, Layout
from hpcsgd.performance.simulation.failures import Checkpointing, Failures, checkpointing, require_few
from hpcsgd.performance.simulation.rank_times import RankTimes
from hpcsgd.performance.simulation.rules import rule_of
from hpcsgd.performance.simulation.simulated_run import Rule, SimulatedRun

MOST = 10**10
"""Steps of all ranks: hours of simulation."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What is simulated: `steps` of each of the groups."""

    layout: Layout
    compute: Distribution
    durations: Durations
    waits: Waits
    """`StepPlan.waits` of a method."""
    steps: int
    stragglers: Stragglers | None = None
    failures: Failures | None = None
    batch_size: int = 1
    """Samples of one group per step."""
    seed: int = 1

    @property
    def rule(self) -> Rule:
        """What plays it."""
        return rule_of(self.waits)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if self.steps * self.layout.N > MOST:
            raise UserError(
                f"[job] steps = {self.steps} of {self.layout.N} ranks: more than {MOST} together; "
                f"allowed are {MOST // self.layout.N} steps",
                key=("job", "steps"),
                value=self.steps,
            )
        if self.failures is not None and self.rule.dies_as_one:
            require_few(self.failures, self.layout.hosts, self.layout.N)


@dataclass(frozen=True)
class Simulated:
    """What became of it."""

    of: Simulation
    seconds: float
    """Until the last group had ended."""
    steps_per_second: float
    """Of a group, while all are at work; the mean over groups."""
    samples_per_second: float
    """Of all groups while all are at work, without those that failures took."""
    goodput: float
    """The part of the groups' time that was not lost to failures, checkpoints included."""
    shares: dict[str, float]
    """Of the groups' time, by cause, until each ended."""
    stats: RankTimes
    checkpointing: Checkpointing | None
    """Where the whole job dies with one of its nodes."""


def simulate(simulation: Simulation) -> Simulated:
    """Raises `UserError` for what cannot be."""
    rule, failures = simulation.rule, simulation.failures
    compute = Compute(simulation.layout, simulation.compute, simulation.stragglers, simulation.seed)
    course = SimulatedRun(compute, simulation.durations, simulation.steps, failures)
    rule.run(course)
    totals = course.stats.totals()
    spent = sum(totals.values())
    saving = None
    if failures and rule.dies_as_one:
        saving = checkpointing(failures, simulation.layout.hosts, simulation.seed, simulation.layout.N)
    goodput = saving.goodput if saving else 1 - totals["failures"] / spent
    rates = course.stats.useful / simulation.layout.P / course.ended
    return Simulated(
        of=simulation,
        seconds=float(course.ended.max()),
        steps_per_second=float(rates.mean()),
        samples_per_second=float(rates.sum()) * simulation.batch_size * (saving.goodput if saving else 1.0),
        goodput=goodput,
        shares={cause: seconds / spent for cause, seconds in totals.items()},
        stats=course.stats,
        checkpointing=saving,
    )
