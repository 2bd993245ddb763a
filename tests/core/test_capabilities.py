"""What is asked of methods and their parts, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcsgd.averagers import Averaged, Mean, MeanOfAll, Measured, Reset
from hpcsgd.config.schema import load
from hpcsgd.core.capabilities import leaves_mean
from hpcsgd.core.method import Method, State
from hpcsgd.core.step import Averager, Step
from hpcsgd.errors import UserError
from hpcsgd.exchanges import AcrossGroups, AllToAll, Gathered, Sparse
from hpcsgd.methods import bsp, fedavg, hierarchical, selsync, ssp, switch
from hpcsgd.sparsifiers import SIDCo, TopK
from hpcsgd.training.delta import always_meeting
from hpcsgd.training.probing import plan_of
from training.launches import JOB


@dataclass(frozen=True)
class Keeping(AllToAll):
    """The user's own exchange, with a memory."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass


@dataclass(frozen=True)
class Composed(AllToAll):
    """One whose part alone has a memory."""

    @property
    def parts(self) -> dict[str, Any]:
        return {"sparsifier": SIDCo(0.1)}


SPARSE = Sparse(TopK(0.1))
KEEPS: dict[str, tuple[Method, bool]] = {
    "dense": (hierarchical(2), False),
    "sparse": (hierarchical(2, SPARSE), True),
    "sparse among all": (bsp(SPARSE), True),
    "somebody's": (bsp(Keeping()), True),
    "a part of it": (bsp(Composed()), True),
    "in an exchange": (Method(Gathered(AcrossGroups(Keeping())), hierarchical(2).when, Mean()), True),
    "a server, whose exchange keeps nothing": (ssp(1), False),
    "a schedule": (selsync(0.5), False),
    "first": (switch(hierarchical(2, Keeping()), bsp(), 3), True),
    "then": (switch(bsp(), hierarchical(2, Keeping()), 3), True),
    "neither, with a server": (switch(bsp(), ssp(1), 3), False),
}


@pytest.mark.parametrize("name", KEEPS)
def test_whether_the_exchange_keeps_something(name: str) -> None:
    method, keeps = KEEPS[name]
    assert method.exchange_keeps() == keeps


def test_a_switch_warns_of_what_its_first_exchange_keeps(caplog: pytest.LogCaptureFixture) -> None:
    switch(bsp(), bsp(Keeping()), 3)
    assert not caplog.records
    switch(bsp(Keeping()), bsp(), 3)
    assert "is dropped at the change" in caplog.text


@pytest.mark.parametrize(
    ("how", "does"),
    [
        (Mean(), True),
        (Measured(Mean()), True),
        (Measured(MeanOfAll()), True),
        (Averaged(Measured(Mean())), False),
        (Measured(Averaged(Mean())), False),
        (Reset(Mean()), False),
        (fedavg(steps_per_epoch=8).how, False),
        (ssp(1).how, False),
    ],
)
def test_whether_it_leaves_the_mean_alone(how: Averager, does: bool) -> None:
    assert leaves_mean(how) == does


class MyMean(Mean):
    """No class that anybody knows of."""


@dataclass
class Fortnightly:
    """A schedule of the user's."""

    steps_between: int = 14

    def __call__(self, s: Step) -> bool:
        return s.t % self.steps_between == 0


class Jumpy:
    """Another one."""

    def __init__(self, delta: float) -> None:
        self.delta, self.changes = delta, torch.zeros(2)

    def __call__(self, s: Step) -> bool:
        return bool((self.changes >= self.delta).any())


def fortnightly() -> Method:
    return Method(Keeping(), Fortnightly(), Measured(MyMean()))


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


def test_the_probe_goes_by_what_a_method_can(
    config: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(config(f"{__name__}:fortnightly"), Path("job.toml"), None, 1)
    assert plan.every == 14
    assert "the probe's groups exchange whole gradients" in caplog.text
    for name, arguments in (
        ("hierarchical", {"every": 2, "moments": "averaged"}),
        ("fedavg", {}),
        ("adacomm", {"interval": 2, "block": 4}),
        (f"{__name__}:jumpy", {"delta": 0.5}),
    ):
        with pytest.raises(UserError, match="the probe is of groups that meet every so many steps"):
            plan_of(config(name, **arguments), Path("job.toml"), None, 1)


def test_a_delta_is_probed_of_whatever_has_one(config: Callable[..., Any]) -> None:
    for name in ("selsync", f"{__name__}:jumpy"):
        assert always_meeting(config(name, delta=0.5), Path("job.toml")).method.arguments == {"delta": 0}
    for name in ("hierarchical", f"{__name__}:calm"):
        with pytest.raises(UserError, match=r"job.toml: \[method\] name = .*: it has no delta to probe"):
            always_meeting(config(name), Path("job.toml"))
