"""Tests of the traits of methods and their parts, including those that users write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor

from hpcsgd.config.schema import load
from hpcsgd.core.averager import Averager, Traits
from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import Method
from hpcsgd.core.state import State
from hpcsgd.core.step import ReduceContext, StepContext
from hpcsgd.core.topology import Topology
from hpcsgd.core.traits import GradReduceTraits, ScheduleTraits
from hpcsgd.core.waits import All
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import UserError
from hpcsgd.methods import bsp, fedavg, hierarchical, selsync, ssp, switch
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers import AverageState, Mean, MeanOfAll, ResetState, WithDistance
from hpcsgd.parts.grad_reduces import AcrossGroups, AllReduce, AllToAll, Quantized, Sparse, WithAllgather
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.sparsifiers import TopK
from hpcsgd.performance.probing.delta import synchronizing_always
from hpcsgd.performance.probing.job_file import plan_of
from train.launches import JOB


@dataclass(frozen=True)
class Keeping(AllToAll):
    """A gradient reduction written by the user, which keeps gradients."""

    traits = replace(AllToAll.traits, keeps_gradients=True)

    def state_dict(self) -> State:
        return State()

    def load_state_dict(self, state: State) -> None:
        pass


SPARSE = Sparse(TopK(0.1))
KEEPS: dict[str, tuple[Method, bool]] = {
    "dense": (hierarchical(2), False),
    "sparse": (hierarchical(2, SPARSE), True),
    "sparse among all": (bsp(SPARSE), True),
    "somebody's": (bsp(Keeping()), True),
    "in a gradient reduction": (
        Method(WithAllgather(AcrossGroups(Keeping())), hierarchical(2).schedule, Mean()),
        True,
    ),
    "a server, whose gradient reduction keeps nothing": (ssp(1), False),
    "a schedule": (selsync(0.5), False),
    "first": (switch(hierarchical(2, Keeping()), bsp(), 3), True),
    "then": (switch(bsp(), hierarchical(2, Keeping()), 3), True),
    "neither, with a server": (switch(bsp(), ssp(1), 3), False),
}


@pytest.mark.parametrize("name", KEEPS)
def test_whether_the_gradient_reduction_keeps_something(name: str) -> None:
    method, keeps = KEEPS[name]
    assert method.grad_reduce.traits.keeps_gradients == keeps


def test_a_switch_warns_of_what_its_first_gradient_reduction_keeps(caplog: pytest.LogCaptureFixture) -> None:
    switch(bsp(), bsp(Keeping()), 3)
    assert not caplog.records
    switch(bsp(Keeping()), bsp(), 3)
    assert "is discarded at the change" in caplog.text


@pytest.mark.parametrize(
    ("how", "does"),
    [
        (Mean(), True),
        (WithDistance(Mean()), True),
        (WithDistance(MeanOfAll()), True),
        (AverageState(WithDistance(Mean())), False),
        (WithDistance(AverageState(Mean())), False),
        (ResetState(Mean()), False),
        (fedavg(steps_per_epoch=8).averager, False),
        (ssp(1).averager, False),
    ],
)
def test_whether_it_leaves_the_mean_alone(how: Averager, does: bool) -> None:
    assert how.traits.leaves_mean == does


class MyMean(Mean):
    """An averager of a class that hpcsgd does not know."""


@dataclass
class Fortnightly:
    """A schedule written by the user, with a period."""

    steps: int = 14

    @property
    def traits(self) -> ScheduleTraits:
        return ScheduleTraits(period=self.steps)

    def __call__(self, s: StepContext) -> bool:
        return s.t % self.steps == 0


class Jumpy:
    """A schedule written by the user, with a threshold."""

    def __init__(self, delta: float) -> None:
        self.traits = ScheduleTraits(threshold=delta)

    def __call__(self, s: StepContext) -> bool:
        s.metrics["delta"] = s.topology.group_index + s.t
        return True


def fortnightly() -> Method:
    return Method(Keeping(), Fortnightly(), WithDistance(MyMean()))


def jumpy(delta: float) -> Method:
    return Method(AllToAll(), Jumpy(delta), Mean())


def calm(delta: float) -> Method:
    return Method(AllToAll(), Fortnightly(int(delta) + 1), Mean())


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "job.toml").write_text(JOB)

    def made(name: str, **arguments: Any) -> Any:
        job = load(tmp_path / "job.toml")
        return replace(job, method=replace(job.method, name=name, arguments=arguments))

    return made


@dataclass
class WithoutTraits:
    """A schedule without traits."""

    def __call__(self, s: StepContext) -> bool:
        return True


class ReduceWithoutTraits:
    """A gradient reduction without traits."""

    def idle(self, topology: Topology) -> bool:
        return True

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        pass


class AveragerWithoutTraits:
    """An averager without traits."""

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        return vectors


class Mistaken(WithoutTraits):
    traits = Traits(All())


WITHOUT_TRAITS: dict[str, Any] = {
    "grad_reduce": ReduceWithoutTraits(),
    "when": WithoutTraits(),
    "a function": lambda s: False,
    "how": AveragerWithoutTraits(),
    "mistaken": Mistaken(),
}


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: Method(AllToAll(), WITHOUT_TRAITS["when"], Mean()),
            "Method: schedule = an object of type WithoutTraits: expected a Schedule: it has no traits, "
            "expected a ScheduleTraits",
        ),
        (
            lambda: Method(AllToAll(), WITHOUT_TRAITS["a function"], Mean()),
            "Method: schedule = <lambda>: expected a Schedule: it has no traits, expected a ScheduleTraits",
        ),
        (
            lambda: Method(WITHOUT_TRAITS["grad_reduce"], Every(2), Mean()),
            "Method: grad_reduce = an object of type ReduceWithoutTraits: expected a GradReduce: it has no "
            "traits, expected a GradReduceTraits",
        ),
        (
            lambda: hierarchical(2, WITHOUT_TRAITS["grad_reduce"]),
            "hierarchical: grad_reduce = an object of type ReduceWithoutTraits: expected a GradReduce: it "
            "has no traits, expected a GradReduceTraits",
        ),
        (
            lambda: WithAllgather(AcrossGroups(WITHOUT_TRAITS["grad_reduce"])),
            "AcrossGroups: inner = an object of type ReduceWithoutTraits: expected a GradReduce: it has no "
            "traits, expected a GradReduceTraits",
        ),
        (
            lambda: Method(AllToAll(), Every(2), WITHOUT_TRAITS["how"]),
            "Method: averager = an object of type AveragerWithoutTraits: expected an Averager: it has no "
            "traits, expected a Traits",
        ),
        (
            lambda: Method(AllToAll(), WITHOUT_TRAITS["mistaken"], Mean()),
            "Method: schedule.traits = an object of type Traits: expected a ScheduleTraits",
        ),
        (lambda: ScheduleTraits(period=0), "period = 0: groups average after at least 1 step"),
        (lambda: ScheduleTraits(period=4, rate=0.5), "rate = 0.5 with period = 4: leave the rate out"),
        (lambda: ScheduleTraits(rate=1.5), "rate = 1.5: expected a share of the steps, 0 to 1"),
        (
            lambda: ScheduleTraits(period=cast(int, "14")),
            "ScheduleTraits: period = '14': expected a whole number or None: did you mean 14?",
        ),
        (GradReduceTraits, "GradReduceTraits: missing a required argument: 'leaves_shards'"),
    ],
)
def test_a_part_that_does_not_say_what_it_is_is_refused_when_a_method_is_made(
    make: Callable[[], object], line: str
) -> None:
    with pytest.raises(UserError) as told:
        make()
    assert str(told.value).startswith(line)
    assert "\n" not in str(told.value)


def test_a_period_says_how_often_groups_average() -> None:
    assert StepPlan.of(hierarchical(4)).sync_rate() == 1 / 4
    assert ScheduleTraits(period=4).rate == 1 / 4


def test_a_wrapper_has_the_traits_of_what_it_is_around_but_for_what_it_changes() -> None:
    inner = AllReduce().traits
    assert AcrossGroups(AllReduce()).traits == replace(inner, across=True)
    assert WithAllgather(AcrossGroups(AllToAll())).traits == replace(inner, across=True)
    assert Quantized(quantizers.int4()).across_groups().traits == GradReduceTraits(
        leaves_shards=True, across=True, per_bucket=True, keeps_gradients=True
    )


def test_a_switch_has_the_traits_of_the_method_whose_turn_it_is() -> None:
    """The exceptions: `per_bucket` is false, and `keeps_gradients` is true if it is for either method."""
    made = switch(bsp(), hierarchical(4, Quantized(quantizers.int4())), 1)
    assert made.schedule.traits == ScheduleTraits(rate=0.0)
    assert made.grad_reduce.traits == GradReduceTraits(leaves_shards=True, across=True)
    cast(Any, made.averager).load_state_dict(State(replicated={"over": True, "lr": 0.1}))
    assert made.schedule.traits == ScheduleTraits(rate=1 / 4)
    assert made.grad_reduce.traits == GradReduceTraits(leaves_shards=True)


def test_the_probe_goes_by_what_a_method_can(
    config: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(config(f"{__name__}:fortnightly"), Path("job.toml"), None, 1)
    assert plan.sync_every == 14
    assert "the probe reduces whole gradients" in caplog.text
    for name, arguments in (
        ("hierarchical", {"sync_every": 2, "optimizer_state": "average"}),
        ("fedavg", {}),
        ("adacomm", {"initial_sync_every": 2, "adapt_every": 4}),
        (f"{__name__}:jumpy", {"delta": 0.5}),
    ):
        with pytest.raises(UserError, match="the probe needs a method that averages models after"):
            plan_of(config(name, **arguments), Path("job.toml"), None, 1)


def test_a_delta_is_probed_of_whatever_has_one(config: Callable[..., Any]) -> None:
    for name in ("selsync", f"{__name__}:jumpy"):
        assert synchronizing_always(config(name, delta=0.5), Path("job.toml")).method.arguments == {
            "delta": 0
        }
    for name in ("hierarchical", f"{__name__}:calm"):
        with pytest.raises(UserError, match=r"job.toml: \[method\] name = .*: it has no delta to probe"):
            synchronizing_always(config(name), Path("job.toml"))
