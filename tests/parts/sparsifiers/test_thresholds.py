"""Sparsifiers that compare with a threshold, and rotating leaders."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.errors import UserError
from hpcsgd.parts.sparsifiers import Accumulated, CLTk, HardThreshold, SIDCo, Sparsifier

M = 200_000


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(seed: int) -> Tensor:
    return torch.rand(M, generator=generator(seed), dtype=torch.float64).clamp(min=1e-12)


DISTRIBUTIONS = {
    "exponential": lambda seed: -uniform(seed).log() * torch.randn(M, generator=generator(seed + 99)).sign(),
    "normal": lambda seed: torch.randn(M, generator=generator(seed), dtype=torch.float64),
    "heavy": lambda seed: torch.randn(M, generator=generator(seed), dtype=torch.float64) ** 3,
}


def selected(sparsifier: Sparsifier, acc: Tensor, t: int, world: Communicator) -> Tensor:
    x = whole(acc)
    return sparsifier.select(x, sparsifier.share(x, t, world))


def whole(acc: Tensor) -> Accumulated:
    return Accumulated(acc, torch.tensor([0, acc.numel()]), acc.double().square().sum().reshape(1))


@pytest.mark.ranks(1)
def test_hard_threshold(run) -> None:
    acc = torch.tensor([0.5, -0.1, -0.7, 0.0, math.nan, 0.499])
    assert run(1, lambda world: selected(HardThreshold(0.5), acc, 0, world).tolist()) == [[0, 2, 4]]


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan])
def test_bad_thresholds(threshold: float) -> None:
    with pytest.raises(UserError, match=r"a magnitude of gradients, > 0|threshold = nan: expected a number"):
        HardThreshold(threshold)


def test_one_stage_of_an_exponential() -> None:
    """The threshold is −μ·ln d, and it gives the density d."""
    acc = DISTRIBUTIONS["exponential"](1)
    found = SIDCo(0.01).threshold(acc)
    assert found == pytest.approx(-acc.abs().mean().item() * math.log(0.01))
    assert (acc.abs() >= found).double().mean().item() == pytest.approx(0.01, rel=0.1)


def test_stages_fit_what_the_one_before_kept() -> None:
    acc = DISTRIBUTIONS["normal"](1).abs()
    sidco = SIDCo(0.01)
    sidco.stages = 3
    first = -acc.mean() * math.log(0.25)
    second = first - (acc[acc >= first] - first).mean() * math.log(0.25)
    third = second - (acc[acc >= second] - second).mean() * math.log(0.01 / 0.25**2)
    assert sidco.threshold(acc) == pytest.approx(third.item())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_number_of_stages_finds_the_density(run, name: str, density: float) -> None:
    def select(world: Communicator) -> list[float]:
        sidco = SIDCo(density)
        return [len(selected(sidco, DISTRIBUTIONS[name](t), t, world)) / M for t in range(60)]

    (achieved,) = run(1, select)
    later = achieved[-20:]
    assert sum(later) / len(later) == pytest.approx(density, rel=0.25)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("acc", "chosen"),
    [
        (torch.zeros(9), []),
        (torch.tensor([1.0, math.nan, 2.0]), [1]),
        (torch.tensor([1.0, math.inf, 2.0, -math.inf]), [1, 3]),
    ],
)
def test_what_cannot_be_fitted(run, acc: Tensor, chosen: list[int]) -> None:
    """Zeros are not selected. Values that are not finite are."""
    assert run(1, lambda world: selected(SIDCo(0.1), acc, 0, world).tolist()) == [chosen]


@pytest.mark.ranks(1)
def test_sidco_goes_on_where_it_was(run) -> None:
    def select(world: Communicator) -> tuple[list[int], list[int]]:
        def stages(sidco: SIDCo, times: range) -> list[int]:
            counts = []
            for t in times:
                selected(sidco, DISTRIBUTIONS["normal"](t), t, world)
                counts.append(sidco.stages)
            return counts

        one, other = SIDCo(0.001), SIDCo(0.001)
        stages(one, range(13))
        other.load_state_dict(one.state_dict().cloned())
        return stages(one, range(13, 30)), stages(other, range(13, 30))

    ((through, again),) = run(1, select)
    assert through == again
    assert max(through) > 1


def test_all_of_it_has_no_tail() -> None:
    with pytest.raises(UserError, match="give less than 1"):
        SIDCo(1)


@pytest.mark.ranks(2)
def test_leaders_take_turns(run) -> None:
    def select(world: Communicator) -> list[int]:
        acc = torch.arange(10.0)
        return [len(selected(CLTk(0.3), acc, t, world)) for t in range(4)]

    assert run(2, select) == [[3, 0, 3, 0], [0, 3, 0, 3]]
