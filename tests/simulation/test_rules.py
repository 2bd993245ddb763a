"""Every rule against the same as simpy processes, and against the closed form where nothing varies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcsgd.core import graphs
from hpcsgd.simulation import Constant, Durations, Lasting, Layout, LogNormal, Measured, Message, Wandering
from hpcsgd.simulation.compute import Compute
from hpcsgd.simulation.course import Course, Rule
from hpcsgd.simulation.rules import AdPsgd, AsyncSgd, Delayed, Hierarchical, Push, Ssp, bsp, d_psgd, osgp, sgp
from simulation import processes

CASES: list[tuple[Rule, Callable[..., np.ndarray]]] = [
    (bsp(), processes.hierarchical),
    (Hierarchical(4), processes.hierarchical),
    (Delayed(Hierarchical(4), 0), processes.delayed),
    (Delayed(Hierarchical(4), 2), processes.delayed),
    (Delayed(Hierarchical(3), 3), processes.delayed),
    (Ssp(0), processes.ssp),
    (Ssp(3), processes.ssp),
    (AsyncSgd(), processes.async_sgd),
    (AdPsgd(), processes.ad_psgd),
    (sgp(), processes.push),
    (sgp(2), processes.push),
    (sgp(graph=graphs.UndirectedExponential()), processes.push),
    (osgp(1), processes.push),
    (osgp(3), processes.push),
    (d_psgd(), processes.push),
    (Push(graphs.BipartiteExponential()), processes.push),
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


def simulated(rule: Rule, compute: Compute, durations: Durations) -> tuple[np.ndarray, Course]:
    """When each group ended each step, (T, P)."""
    course = Course(compute, durations, T)
    F, made = np.full((T, compute.layout.P), np.nan), course.made

    def listen(steps: Any, groups: Any, times: np.ndarray) -> None:
        F[steps, groups] = times
        made(steps, groups, times)

    course.made = listen  # pyright: ignore[reportAttributeAccessIssue]
    rule.run(course)
    return F, course


def durations(message: Message) -> Durations:
    return Durations(exchange=0.011, update=0.003, meeting=0.04, gather=0.007, message=message)


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
        spent = sum(course.ledger.totals().values())
        assert spent == pytest.approx(course.ended.sum(), rel=1e-9)
        assert all(seconds.min() > -1e-9 for seconds in course.ledger.seconds.values())


@pytest.mark.parametrize("link", [0.01, 0.03, 0.1])
def test_answers_that_are_late_hold_up_those_who_asked_alone(link: float) -> None:
    """Many on a host, of whom some know their answers long before others."""
    d = durations(Message(latency=0.02, link=link))
    for seed in range(20):
        compute = Compute(Layout(16, 1, 8), LogNormal(0.1, 0.7), seed=seed)
        F, _ = simulated(AdPsgd(seed), compute, d)
        expected = processes.ad_psgd(processes.Job(compute, d, T), AdPsgd(seed))
        np.testing.assert_allclose(F, expected, rtol=1e-9, err_msg=str(seed))


def closed(d: Durations, every: float) -> float:
    """Seconds of T steps of constant compute, with a meeting in every I-th."""
    return T * (0.1 + d.exchange + d.update + d.gather) + T // every * d.meeting


@pytest.mark.parametrize("every", [1, 2, 7])
def test_without_chance_it_is_the_closed_form(every: int) -> None:
    d = durations(Message())
    _, course = simulated(Hierarchical(every), Compute(Layout(6, 4), Constant(0.1)), d)
    np.testing.assert_allclose(course.ended, closed(d, every), rtol=1e-9)


@pytest.mark.parametrize("rule", [Ssp(0), sgp(), sgp(3), d_psgd()], ids=id_of)
@pytest.mark.parametrize("on_a_host", [1, 4])
def test_all_at_once_share_the_link_as_the_closed_form_has_it(rule: Rule, on_a_host: int) -> None:
    """First come, first served: the last of the n messages of a host is there after latency + n·link."""
    d = durations(Message(latency=1e-3, link=4e-3))
    compute = Compute(Layout(8, 2, 2 * on_a_host), Constant(0.1))
    F, _ = simulated(rule, compute, d)
    assert F[0].max() == pytest.approx(0.1 + d.before_meeting + 1e-3 + on_a_host * 4e-3 + d.gather, rel=1e-9)


def test_ssp_of_no_staleness_goes_at_the_pace_of_the_last_message() -> None:
    d = durations(Message(latency=1e-3, link=4e-3))
    F, _ = simulated(Ssp(0), Compute(Layout(8, 2, 8), Constant(0.1)), d)
    step = 0.1 + d.before_meeting + 1e-3 + 4 * 4e-3 + d.gather
    np.testing.assert_allclose(F, step * np.arange(1, T + 1)[:, None] * np.ones(8), rtol=1e-9)


def test_nobody_is_further_ahead_than_ssp_allows() -> None:
    compute = Compute(Layout(6, 1), LogNormal(0.1, 0.2), Lasting(5.0, ranks=[3]))
    for s in (0, 2, 5):
        F, _ = simulated(Ssp(s), compute, durations(Message()))
        for t in range(s, T - 1):  # who has begun step t + 1 has seen all end step t − s
            assert (F[t + 1] >= F[t - s, 3]).all()


def test_a_straggler_holds_up_all_but_those_who_do_not_wait() -> None:
    compute = Compute(Layout(8, 1), Constant(0.1), Lasting(3.0, ranks=[5]))
    d = Durations()
    ended = {str(rule): simulated(rule, compute, d)[1].ended for rule in (bsp(), AsyncSgd(), sgp(), AdPsgd())}
    np.testing.assert_allclose(ended[str(bsp())], T * 0.3)
    np.testing.assert_allclose(np.delete(ended[str(AsyncSgd())], 5), T * 0.1)
    assert ended[str(sgp())].min() > 0.9 * T * 0.3
    assert ended[str(AsyncSgd())][5] == pytest.approx(T * 0.3)


def test_the_same_seconds_whoever_asks() -> None:
    compute = Compute(Layout(4, 2), LogNormal(0.1, 0.5), Wandering(2.0, 0.5), seed=3)
    later = compute.seconds(7)
    compute.seconds(2)
    np.testing.assert_array_equal(compute.seconds(7), later)
    assert not np.array_equal(compute.seconds(2), later)
