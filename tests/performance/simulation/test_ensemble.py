"""Groups that die and return, compared with simpy processes that are killed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import simpy

from hpcsgd.core.waits import All, Living, Waits
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation import (
    Constant,
    Durations,
    Failures,
    Layout,
    LogNormal,
    Simulated,
    Simulation,
    simulate,
)
from hpcsgd.performance.simulation.compute import Compute
from hpcsgd.performance.simulation.rules import Ensemble
from hpcsgd.performance.simulation.simulated_run import SimulatedRun
from performance.simulation.processes import Process

T = 48
LIVING = Living(4)
D = Durations(grad_reduce=0.011, update=0.003, model_average=0.04, gather=0.007)


class Groups:
    """A process for each life of a group, and one that synchronizes the living groups."""

    def __init__(self, course: SimulatedRun, rule: Ensemble) -> None:
        assert course.failures is not None
        self.failures = course.failures
        self.env, self.course, self.rule = simpy.Environment(), course, rule
        self.every = int(rule.every)
        assert course.steps_per_epoch is not None
        self.per_epoch = course.steps_per_epoch
        self.P, self.restart = course.layout.P, course.failures.restart_seconds
        of_node, of_rank = course.failures.mtbf_seconds, course.failures.rank_mtbf_seconds or math.inf
        alone = course.layout.groups_on_a_host == 1
        nodes = math.ceil(course.layout.K / course.layout.ranks_per_host) if alone else 0
        hazard = nodes / of_node + course.layout.K / of_rank
        self.life = 1 / hazard if hazard else math.inf
        self.chance = course.generator("deaths")
        hosts = [] if alone else range(course.layout.hosts)
        gaps = [course.generator(f"node {host}").exponential(of_node, 1000) for host in hosts]
        self.downs = [np.cumsum(each) for each in gaps]
        self.F = np.full((T, self.P), np.nan)
        self.alive: set[int] = set()
        self.dies: dict[int, float] = {}
        self.unheard = 0.0
        self.arrived: set[int] = set()
        self.deaths = self.again = 0
        self.syncs = [t for t in range(1, T + 1) if t % self.every == 0 or t % self.per_epoch == 0]
        """The steps after which groups synchronize."""

    def run(self) -> np.ndarray:
        self.begin(range(self.P), 0)
        self.env.run()
        return self.F

    def begin(self, replica_groups: range | list[int], t: int) -> None:
        """Start lives at step t for all these groups now."""
        self.synced = self.env.event()
        for g, end in zip(replica_groups, self.ends(replica_groups), strict=True):
            self.dies[g] = end
            self.alive.add(g)
            self.env.process(self.lives(g, t))

    def ends(self, replica_groups: range | list[int]) -> list[float]:
        """Return the ends of lives that begin now, by a group's own failure or by that of its host."""
        many, now = len(replica_groups), self.env.now
        own = self.chance.exponential(self.life, many) if self.life < math.inf else [math.inf] * many
        shared = [self.downs[g // self.course.layout.groups_on_a_host] for g in replica_groups if self.downs]
        nodes = [down[down > now][0] for down in shared] or [math.inf] * many
        return [min(now + life, node) for life, node in zip(own, nodes, strict=True)]

    def lives(self, g: int, t: int) -> Process:
        """Train until the death or the end."""
        while t < T:
            work = float(self.course.compute.seconds(t)[g].max()) + D.before_sync
            if self.env.now + work >= self.dies[g]:
                yield self.env.timeout(max(self.dies[g] - self.env.now, 0.0))
                return self.dead(g, t)
            yield self.env.timeout(work)
            t += 1
            if t in self.syncs:
                self.arrived.add(g)
                synced = self.synced
                self.look(t)
                yield synced
            yield self.env.timeout(D.gather)
            self.F[t - 1, g] = self.env.now

    def dead(self, g: int, t: int) -> None:
        self.deaths += 1
        self.alive.remove(g)
        self.unheard = max(self.unheard, self.dies[g] + self.failures.heartbeat_timeout_seconds)
        if not self.alive:
            self.env.process(self.begins_again(t))
        elif t < T:
            self.look(next(sync for sync in self.syncs if sync > t))

    def begins_again(self, t: int) -> Process:
        self.again += 1
        self.unheard, self.arrived = 0.0, set()
        first = min(range(self.P), key=lambda g: self.dies[g])
        yield self.env.timeout(max(self.dies[first] + self.restart - self.env.now, 0.0))
        self.begin([first], t - t % self.per_epoch)

    def look(self, t: int) -> None:
        """Synchronize if all living groups have arrived before step t."""
        if self.arrived == self.alive and t <= T:
            self.env.process(self.synchronize(t))

    def synchronize(self, t: int) -> Process:
        yield self.env.timeout(max(self.unheard - self.env.now, 0.0))
        self.unheard, begin = 0.0, self.env.now
        if len(self.alive) > 1:
            yield self.env.timeout(D.model_average)
        synced, self.synced = self.synced, self.env.event()
        self.arrived = set()
        if t % self.per_epoch == 0:
            dead = sorted(set(range(self.P)) - self.alive)
            self.back([g for g in dead if self.dies[g] + self.restart <= begin], t)
        synced.succeed()

    def back(self, replica_groups: list[int], t: int) -> None:
        for g, end in zip(replica_groups, self.ends(replica_groups), strict=True):
            self.dies[g] = end
            self.alive.add(g)
            self.env.process(self.comes_back(g, t))

    def comes_back(self, g: int, t: int) -> Process:
        yield self.env.timeout(D.gather)
        self.F[t - 1, g] = self.env.now
        yield from self.lives(g, t)


@pytest.mark.parametrize("mtbf", [2.0, 6.0, 30.0])
@pytest.mark.parametrize("per_epoch", [6, 8])
@pytest.mark.parametrize(
    ("shape", "a_host", "of_rank"),
    [
        *(((P, K), K, None) for P, K in [(1, 2), (2, 1), (3, 2), (6, 3)]),
        ((4, 2), 2, 20.0),
        ((6, 1), 2, None),
        ((6, 1), 3, 20.0),
        ((3, 4), 2, 40.0),
    ],
)
def test_the_same_as_groups_that_are_killed(
    shape: tuple[int, int], a_host: int, of_rank: float | None, mtbf: float, per_epoch: int
) -> None:
    """Groups synchronize every 3 steps. An epoch of 8 steps ends between two such synchronizations."""
    rule = Ensemble(every=3)
    deaths = again = 0
    for seed in range(1, 9):
        failures = Failures(
            mtbf, checkpoint_seconds=1.0, restart_seconds=0.7, rank_mtbf_seconds=of_rank,
            heartbeat_timeout_seconds=0.3,
        )  # fmt: skip
        compute = Compute(Layout(*shape, ranks_per_host=a_host), LogNormal(0.1, 0.4), seed=seed)
        course = SimulatedRun(compute, D, T, failures, per_epoch)
        F, made = np.full((T, shape[0]), np.nan), course.made

        def listen(steps: int, groups: np.ndarray, times: np.ndarray, F=F, made=made) -> None:
            F[steps, groups] = times
            made(steps, groups, times)

        course.made = listen  # pyright: ignore[reportAttributeAccessIssue]
        rule.run(course)
        replica_groups = Groups(SimulatedRun(compute, D, T, failures, per_epoch), rule)
        np.testing.assert_allclose(F, replica_groups.run(), rtol=1e-9, err_msg=str(seed))
        assert sum(course.stats.totals().values()) == pytest.approx(course.ended.sum(), rel=1e-9)
        deaths, again = deaths + replica_groups.deaths, again + replica_groups.again
    assert deaths
    assert again or shape[0] > 1


def simulated(failures: Failures | None, waits: Waits = LIVING, per_epoch: int = 4) -> Simulated:
    job = Simulation(
        layout=Layout(8, 1), compute=Constant(0.1), durations=D, waits=waits, steps=T, failures=failures,
        steps_per_epoch=per_epoch,
    )  # fmt: skip
    return simulate(job)


def test_without_failures_it_is_hierarchical() -> None:
    assert simulated(None).seconds == pytest.approx(simulated(None, All(period=4)).seconds, rel=1e-12)
    assert simulated(None).goodput == 1


def test_silence_is_waited_for_and_the_living_go_on() -> None:
    failures = Failures(10.0, checkpoint_seconds=1.0, restart_seconds=5.0)
    soon, late = (simulated(replace(failures, heartbeat_timeout_seconds=s)) for s in (0.1, 2.0))
    assert simulated(None).seconds <= soon.seconds < late.seconds
    assert 0 < soon.goodput < 1
    assert soon.checkpointing is None
    assert soon.samples_per_second < simulated(None).samples_per_second
    assert soon.stats.useful < 8 * T


def test_an_epoch_that_nobody_lives_through_is_reported() -> None:
    with pytest.raises(UserError, match=r"^no group lived through the epoch from step 0 on in 1,000"):
        simulated(Failures(0.3, checkpoint_seconds=1.0), per_epoch=40)
