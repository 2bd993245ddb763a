"""Simulate a job from the durations of its parts: how fast it is, and what its groups wait for."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsgd.core.waits import Living, Waits, require_quorum
from hpcsgd.errors import UserError, in_section
from hpcsgd.performance.simulation.compute import Compute, Distribution, Stragglers
from hpcsgd.performance.simulation.durations import Durations, Layout
from hpcsgd.performance.simulation.failures import Checkpointing, Failures, checkpointing, require_few
from hpcsgd.performance.simulation.rank_times import RankTimes
from hpcsgd.performance.simulation.rules import rule_of
from hpcsgd.performance.simulation.simulated_run import Rule, SimulatedRun, SyncRecord

MOST = 10**10
"""The largest number of steps of all ranks together; simulating so many takes hours."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The job to simulate: `steps` steps of each group."""

    layout: Layout
    compute: Distribution
    durations: Durations
    waits: Waits
    """How the method's groups wait for each other, which is `StepPlan.waits` of the method."""
    steps: int
    stragglers: Stragglers | None = None
    failures: Failures | None = None
    batch_size: int = 1
    """Samples of one group per step."""
    steps_per_epoch: int | None = None
    """Steps of an epoch in which all groups have samples, if groups may die or be late; None: one epoch."""
    seed: int = 1

    @property
    def rule(self) -> Rule:
        """The object that simulates a run in which groups wait for each other as `waits` says."""
        return rule_of(self.waits)

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "steps_per_epoch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} = {value}: expected 1 or more")
        if self.steps * self.layout.N > MOST:
            raise UserError(
                f"[job] steps = {self.steps} of {self.layout.N} ranks: more than {MOST} together; "
                f"allowed are {MOST // self.layout.N} steps",
                key=("job", "steps"),
                value=self.steps,
            )
        with in_section("method"):
            require_quorum(self.waits, self.layout.P)
            self._require_no_failures_with_quorum()
        if self.failures is not None and self.rule.dies_as_one:
            require_few(self.failures, self.layout.hosts, self.layout.N)

    def _require_no_failures_with_quorum(self) -> None:
        if self.failures is not None and isinstance(self.waits, Living) and self.waits.quorum is not None:
            quorum = self.waits.quorum.groups
            why = f"quorum = {quorum}: failures are simulated only without it: leave one of the two out"
            raise UserError(why, key="quorum", value=quorum)


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation."""

    of: Simulation
    seconds: float
    """Simulated seconds until the last group ended."""
    steps_per_second: float
    """Steps per second of a group, as a mean over groups; only useful steps count."""
    samples_per_second: float
    """Samples per second of all groups together, without samples lost to failures."""
    goodput: float
    """The share of the groups' time that was not lost to failures, nor spent on checkpoints."""
    shares: dict[str, float]
    """Shares of the groups' time by cause, as in `rank_times.CAUSES`, until each group ended."""
    lost: float
    """The share of the groups' steps that no synchronization has counted, because of failures or lateness."""
    syncs: list[SyncRecord]
    """All synchronizations, if groups may be left out of them."""
    stats: RankTimes
    checkpointing: Checkpointing | None
    """The goodput with checkpoints, if failures are simulated and end the whole job; otherwise None."""


def simulate(simulation: Simulation) -> Simulated:
    """Run the simulation. Raises `UserError` if the settings are impossible."""
    rule, failures = simulation.rule, simulation.failures
    compute = Compute(simulation.layout, simulation.compute, simulation.stragglers, simulation.seed)
    course = SimulatedRun(
        compute, simulation.durations, simulation.steps, failures, simulation.steps_per_epoch
    )
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
        lost=float(course.stats.lost.sum() / course.stats.count.sum()),
        syncs=course.syncs,
        stats=course.stats,
        checkpointing=saving,
    )
