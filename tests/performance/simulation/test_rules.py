"""Every rule, compared with simpy processes, and with the closed form where times are constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from hpcsgd.core import graphs
from hpcsgd.core.waits import Pairs
from hpcsgd.performance.simulation import (
    Constant,
    Durations,
    Lasting,
    Layout,
    LogNormal,
    Measured,
    Message,
    Wandering,
)
from hpcsgd.performance.simulation.compute import Compute
from hpcsgd.performance.simulation.rules import (
    AdPsgd,
    AsyncSgd,
    Changing,
    Delayed,
    Paired,
    Push,
    Ssp,
    Synchronous,
)
from hpcsgd.performance.simulation.simulated_run import Rule, SimulatedRun
from performance.simulation import processes

GOSSIP = Push(graphs.Exponential())
CASES: list[tuple[Rule, Callable[..., np.ndarray]]] = [
    (Synchronous(1), processes.synchronous),
    (Synchronous(4), processes.synchronous),
    (Synchronous(Fraction(8, 3)), processes.synchronous),
    (Delayed(4, 2), processes.delayed),
    (Delayed(3, 3), processes.delayed),
    (Delayed(Fraction(3, 2), 4), processes.delayed),
    (Ssp(0), processes.ssp),
    (Ssp(3), processes.ssp),
    (Ssp(0, period=4), processes.ssp),
    (Ssp(2, period=3), processes.ssp),
    (AsyncSgd(), processes.async_sgd),
    (AsyncSgd(period=3), processes.async_sgd),
    (AdPsgd(), processes.ad_psgd),
    (GOSSIP, processes.push),
    (Push(graphs.Exponential(2)), processes.push),
    (Push(graphs.UndirectedExponential()), processes.push),
    (Push(graphs.Exponential(), 1), processes.push),
    (Push(graphs.Exponential(), 3), processes.push),
    (Push(graphs.Ring()), processes.push),
    (Push(graphs.Ring(), 1, period=3), processes.push),
    (Push(graphs.BipartiteExponential()), processes.push),
    (Paired(Pairs(seed=3, every=3), 3), processes.paired),
    (Paired(Pairs(seed=3, every=1), 1), processes.paired),
    (Paired(Pairs(seed=3, every=5, late=2), Fraction(5, 2)), processes.paired),
]
LAYOUTS = [(1, 3, 1), (2, 1, 1), (3, 2, 2), (3, 2, 4), (4, 2, 8), (7, 1, 3), (9, 2, 6)]
MESSAGES = {
    "free": Message(),
    "short": Message(latency=1e-4, link=2e-3),
    "as long as a step": Message(latency=1e-2, link=5e-2),
    "the link is too slow": Message(latency=0.2, link=0.15),
}
COMPUTE: dict[str, tuple[Any, Any]] = {
    "little noise": (LogNormal(0.1, 0.05), None),
    "much noise, some slow now and then": (LogNormal(0.1, 1.0), Wandering(5.0, 0.2)),
    "measured, one slow": (
        Measured(np.random.default_rng(0).gamma(9.0, 0.01, 997).tolist()),
        Lasting(4.0, ranks=[0]),
    ),
}
T = 16


def id_of(value: object) -> str:
    return value.__name__ if callable(value) else str(value).replace("()", "")


def simulated(rule: Rule, compute: Compute, durations: Durations) -> tuple[np.ndarray, SimulatedRun]:
    """Return when each group ended each step, (T, P), and the run."""
    course = SimulatedRun(compute, durations, T)
    F, made = np.full((T, compute.layout.P), np.nan), course.made

    def listen(steps: Any, groups: Any, times: np.ndarray) -> None:
        F[steps, groups] = times
        made(steps, groups, times)

    course.made = listen  # pyright: ignore[reportAttributeAccessIssue]
    rule.run(course)
    return F, course


def durations(message: Message) -> Durations:
    return Durations(grad_reduce=0.011, update=0.003, model_average=0.04, gather=0.007, message=message)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize(("rule", "process"), CASES, ids=id_of)
def test_the_same_as_one_event_at_a_time(rule: Rule, process: Any, message: str, compute: str) -> None:
    distribution, stragglers = COMPUTE[compute]
    for shape in LAYOUTS:
        drawn = Compute(Layout(*shape), distribution, stragglers, seed=5)
        d = durations(MESSAGES[message])
        F, course = simulated(rule, drawn, d)
        np.testing.assert_allclose(
            F, process(processes.Job(drawn, d, T), rule), rtol=1e-9, err_msg=str(shape)
        )
        spent = sum(course.stats.totals().values())
        assert spent == pytest.approx(course.ended.sum(), rel=1e-9)
        assert all(seconds.min() > -1e-9 for seconds in course.stats.seconds.values())


@pytest.mark.parametrize("average_s", [0.1, 0.3, 1.0])
def test_synchronizations_under_way_follow_one_after_another(average_s: float) -> None:
    rule, d = Delayed(Fraction(3, 2), 4), replace(durations(Message()), model_average=average_s)
    compute = Compute(Layout(3, 2), LogNormal(0.1, 0.5), seed=2)
    F, _ = simulated(rule, compute, d)
    np.testing.assert_allclose(F, processes.delayed(processes.Job(compute, d, T), rule), rtol=1e-9)


@pytest.mark.parametrize("link", [0.01, 0.03, 0.1])
def test_answers_that_are_late_hold_up_those_who_asked_alone(link: float) -> None:
    """A host has many groups, and some know their answers long before others."""
    d = durations(Message(latency=0.02, link=link))
    for seed in range(20):
        compute = Compute(Layout(16, 1, 8), LogNormal(0.1, 0.7), seed=seed)
        F, _ = simulated(AdPsgd(seed), compute, d)
        expected = processes.ad_psgd(processes.Job(compute, d, T), AdPsgd(seed))
        np.testing.assert_allclose(F, expected, rtol=1e-9, err_msg=str(seed))


def closed(d: Durations, every: float) -> float:
    """Return the seconds of T steps of constant compute, with a synchronization in every `every`-th."""
    return T * (0.1 + d.grad_reduce + d.update + d.gather) + T // every * d.model_average


@pytest.mark.parametrize("every", [1, 2, 7])
def test_without_chance_it_is_the_closed_form(every: int) -> None:
    d = durations(Message())
    _, course = simulated(Synchronous(every), Compute(Layout(6, 4), Constant(0.1)), d)
    np.testing.assert_allclose(course.ended, closed(d, every), rtol=1e-9)


@pytest.mark.parametrize(
    "rule", [Ssp(0), GOSSIP, Push(graphs.Exponential(3)), Push(graphs.Ring())], ids=id_of
)
@pytest.mark.parametrize("on_a_host", [1, 4])
def test_all_at_once_share_the_link_as_the_closed_form_has_it(rule: Rule, on_a_host: int) -> None:
    """In order of arrival, the last of the n messages of a host arrives after latency + n·link."""
    d = durations(Message(latency=1e-3, link=4e-3))
    compute = Compute(Layout(8, 2, 2 * on_a_host), Constant(0.1))
    F, _ = simulated(rule, compute, d)
    assert F[0].max() == pytest.approx(0.1 + d.before_sync + 1e-3 + on_a_host * 4e-3 + d.gather, rel=1e-9)


def test_ssp_of_no_staleness_goes_at_the_pace_of_the_last_message() -> None:
    d = durations(Message(latency=1e-3, link=4e-3))
    F, _ = simulated(Ssp(0), Compute(Layout(8, 2, 8), Constant(0.1)), d)
    step = 0.1 + d.before_sync + 1e-3 + 4 * 4e-3 + d.gather
    np.testing.assert_allclose(F, step * np.arange(1, T + 1)[:, None] * np.ones(8), rtol=1e-9)


def test_nobody_is_further_ahead_than_ssp_allows() -> None:
    compute = Compute(Layout(6, 1), LogNormal(0.1, 0.2), Lasting(5.0, ranks=[3]))
    for s in (0, 2, 5):
        F, _ = simulated(Ssp(s), compute, durations(Message()))
        for t in range(s, T - 1):  # a group that has begun step t + 1 has seen all groups end step t − s
            assert (F[t + 1] >= F[t - s, 3]).all()


def test_a_straggler_holds_up_all_but_those_who_do_not_wait() -> None:
    compute = Compute(Layout(8, 1), Constant(0.1), Lasting(3.0, ranks=[5]))
    d = Durations()
    ended = {
        str(rule): simulated(rule, compute, d)[1].ended
        for rule in (Synchronous(1), AsyncSgd(), GOSSIP, AdPsgd())
    }
    np.testing.assert_allclose(ended[str(Synchronous(1))], T * 0.3)
    np.testing.assert_allclose(np.delete(ended[str(AsyncSgd())], 5), T * 0.1)
    assert ended[str(GOSSIP)].min() > 0.9 * T * 0.3
    assert ended[str(AsyncSgd())][5] == pytest.approx(T * 0.3)


def test_the_same_seconds_whoever_asks() -> None:
    compute = Compute(Layout(4, 2), LogNormal(0.1, 0.5), Wandering(2.0, 0.5), seed=3)
    later = compute.seconds(7)
    compute.seconds(2)
    np.testing.assert_array_equal(compute.seconds(7), later)
    assert not np.array_equal(compute.seconds(2), later)


@pytest.mark.parametrize(
    "then", [Synchronous(4), Ssp(1), Push(graphs.Exponential(), 2), AdPsgd(), Delayed(3, 2)]
)
@pytest.mark.parametrize("first", [Synchronous(1), AsyncSgd(), GOSSIP, AdPsgd(), Delayed(4, 3)])
@pytest.mark.parametrize("at", [0, 7, T, T + 1])
def test_after_a_change_all_go_on_together_as_the_second_one_alone(first: Rule, then: Rule, at: int) -> None:
    d = durations(Message(latency=1e-3, link=4e-3))
    drawn = Compute(Layout(5, 2, 4), LogNormal(0.1, 0.3), seed=2)
    F, course = simulated(Changing(first, then, at), drawn, d)
    alone, _ = simulated(then if at == 0 else first, drawn, d)
    until = min(at, T) if at else T
    np.testing.assert_array_equal(F[:until], alone[:until])
    assert (course.stats.count == 5).all()
    assert sum(course.stats.totals().values()) == pytest.approx(course.ended.sum(), rel=1e-9)
    if at == T:
        np.testing.assert_allclose(course.ended, course.ended.max())
        assert course.ended.max() > F[-1].max()
    if at == 7 and then == Synchronous(4):  # after steps 8, 12 and 16, counted over the whole training
        synced = F.max(axis=1) == F.min(axis=1)
        assert [t + 1 for t in range(at, T) if synced[t]] == [8, 12, 16]


def test_who_changes_takes_in_what_is_under_way() -> None:
    """A synchronization begins after step 4, takes half a second, and is still pending at the change."""
    d = Durations(model_average=0.5)
    _, course = simulated(
        Changing(Delayed(4, 3), Synchronous(100), 5), Compute(Layout(3, 1), Constant(0.1)), d
    )
    np.testing.assert_allclose(course.ended, 0.4 + 0.5 + 0.5 + (T - 5) * 0.1)
