"""MiCRO: which part each worker searches, the threshold and its start, and the resulting density."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.parts.sparsifiers import Accumulated, ExDyna, MiCRO
from hpcsgd.parts.sparsifiers.base import Adapting, Foreseeing
from hpcsgd.parts.sparsifiers.micro import Threshold
from sparsifying import Exdyna, Micro, Select

Make = Callable[[], MiCRO | ExDyna]
KINDS: dict[str, tuple[Make, Select]] = {
    "MiCRO": (lambda: MiCRO(0.01), Micro(0.01)),
    "ExDyna": (lambda: ExDyna(0.01), Exdyna(0.01)),
    "ExDyna for slopes": (lambda: ExDyna(0.01, compare_neighbours=True), Exdyna(0.01, slopes=True)),
}


def whole(acc: Tensor) -> Accumulated:
    return Accumulated(acc, torch.tensor([0, acc.numel()]), acc.double().square().sum().reshape(1))


class Worker:
    """One of several workers, with error feedback; a step returns what each worker selected."""

    def __init__(self, world: Communicator, sparsifier: MiCRO | ExDyna, M: int) -> None:
        self.world, self.sparsifier = world, sparsifier
        self.acc, self.t = torch.zeros(M), 0
        self.chance = torch.Generator().manual_seed(world.rank)

    def gradient(self) -> Tensor:
        return torch.randn(self.acc.numel(), generator=self.chance)

    def step(self, g: Tensor | None = None) -> list[Tensor]:
        self.acc += self.gradient() if g is None else g
        x = whole(self.acc)
        mine = self.sparsifier.select(x, self.sparsifier.share(x, self.t, self.world))
        everyones = self.world.gather_objects(mine)
        self.sparsifier.adapt([len(each) for each in everyones], self.t, self.acc.numel())
        self.acc[torch.cat(everyones)] = 0
        self.t += 1
        return everyones


@pytest.mark.parametrize(("n", "M"), [(1, 5000), (2, 5000), (3, 4999), (4, 4999), (4, 40_001), (4, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_selects_what_the_paper_does(run, kind: str, n: int, M: int) -> None:
    """The parts are disjoint and rotate. k', λ and the bounds of parts follow from step to step."""
    make, reference = copy.deepcopy(KINDS[kind])

    def select(world: Communicator) -> list[list[list[int]]]:
        worker = Worker(world, make(), M)
        return [[each.tolist() for each in worker.step()] for _ in range(25)]

    accs, chances = np.zeros((n, M)), [torch.Generator().manual_seed(rank) for rank in range(n)]
    for t, selected in enumerate(run(n, select)[0]):
        accs += np.stack([torch.randn(M, generator=chance).numpy() for chance in chances])
        accs = accs.astype(np.float32).astype(np.float64)
        joint = reference(list(accs), [M], t)
        accs[:, joint] = 0
        together = [i for mine in selected for i in mine]
        assert all(mine == sorted(mine) for mine in selected)
        assert len(set(together)) == len(together) >= min(n, M), "no element twice, and one of every part"
        assert sorted(together) == joint.tolist()


@pytest.mark.ranks(3)
def test_every_worker_searches_each_part(run) -> None:
    """In each step the parts cover everything without gaps; each worker searches all of it in n steps."""

    def searched(world: Communicator) -> list[tuple[int, int]]:
        x, micro = whole(torch.ones(11)), MiCRO(0.1)
        shares = [micro.share(x, t, world) for t in range(4)]
        return [(int(share.starts), int(share.stops)) for share in shares]

    parts = [(0, 3), (3, 7), (7, 11)]
    assert run(3, searched) == [[parts[(t + rank) % 3] for t in range(4)] for rank in range(3)]


@pytest.mark.parametrize(
    ("selected", "factor"),
    [
        (0, 0.995),
        (909, 0.995),
        (910, 1.00125),
        (1000, 1.00125),
        (1100, 1.00125),
        (1101, 1.005),
        (9999, 1.005),
    ],
)
def test_the_threshold_follows_the_density(selected: int, factor: float) -> None:
    threshold = Threshold(0.1)
    threshold.value = 2.0
    threshold.adapt(selected, 10_000)
    assert threshold.value == 2 * factor


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_the_threshold_begins_in_the_unit_of_the_gradient(run, unit: float) -> None:
    """The threshold is worker 0's, the paper's 1/(2√k) for a gradient of norm 1, and it is set once."""

    def begun(world: Communicator) -> list[float]:
        threshold, acc = Threshold(0.04), torch.full((100,), 0.1 * (1 + world.rank), dtype=torch.float64)
        threshold.begin(whole(unit * acc), world)
        threshold.begin(whole(3 * acc), world)
        return [threshold.value]

    assert run(2, begun) == [[pytest.approx(unit / 4)]] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_gradient_that_has_no_norm_begins_nothing(run, bad: float) -> None:
    """Values that are not finite are sent, and the next step sets the threshold.

    Of zeros each worker sends one, as always.
    """

    def steps(world: Communicator) -> tuple[list[list[int]], list[list[int]], float]:
        worker = Worker(world, MiCRO(0.1), 20)
        first = torch.zeros(20) if bad == 0 else torch.ones(20)
        first[[4, 15]] = bad
        one = [each.tolist() for each in worker.step(first)]
        worker.acc.zero_()
        other = [each.tolist() for each in worker.step(torch.arange(20.0))]
        return one, other, worker.sparsifier.state_dict().mean["threshold"]

    for first, second, found in run(2, steps):
        assert first == ([[0], [10]] if bad == 0 else [[4], [15]])
        largest = math.sqrt(sum(i * i for i in range(20))) / (2 * math.sqrt(2))
        assert second == [[i for i in range(10, 20) if i >= largest], [1]], "none: the element t mod 10"
        assert found == pytest.approx(1.005 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_density_stays_as_set_and_nothing_is_lost(run, kind: str, n: int) -> None:
    """From step 200 on the density is within a tenth.

    The residuals and n times the sum of the sent means equal the sum of all gradients.
    """
    M, steps = 20_000, 400

    def train(world: Communicator) -> tuple[list[float], Tensor, Tensor, Tensor]:
        worker = Worker(world, KINDS[kind][0](), M)
        given, sent, densities = torch.zeros(M, dtype=torch.float64), torch.zeros(M, dtype=torch.float64), []
        for _ in range(steps):
            g = worker.gradient()
            given += g
            before = (worker.acc + g).double()
            joint = torch.cat(worker.step(g))
            sent[joint] += before[joint]
            densities.append(len(joint) / M)
        return densities, given, sent, worker.acc

    found = run(n, train)
    densities = found[0][0]
    assert np.mean(densities[200:]) == pytest.approx(0.01, rel=0.1)
    assert np.mean(densities[-100:]) == pytest.approx(0.01, rel=0.1)
    assert max(densities) < 0.1
    for _, given, sent, left in found:
        torch.testing.assert_close(left.double() + sent, given, rtol=0, atol=1e-3)


@pytest.mark.parametrize("make", [make for make, _ in KINDS.values()])
def test_what_is_expected_of_a_step(make: Make) -> None:
    sparsifier = make()
    assert isinstance(sparsifier, Foreseeing)
    assert isinstance(sparsifier, Adapting)
    x = sparsifier.expected(100_000, [60_000, 40_000], 4)
    assert (x.each, x.joint, x.searched, x.allocation) == (250, 1000, 25_000, 0)
    assert x.density == 0.01


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_where_it_was(run, kind: str) -> None:
    def select(world: Communicator) -> tuple[list[list[int]], list[list[int]]]:
        one, other = (Worker(world, KINDS[kind][0](), 40_000) for _ in range(2))
        slope = torch.linspace(4, 0.5, 40_000)
        for _ in range(20):
            one.step(slope * one.gradient())
        other.acc, other.t = one.acc.clone(), one.t
        other.chance.set_state(one.chance.get_state())
        other.sparsifier.load_state_dict(one.sparsifier.state_dict().cloned())
        through, again = (
            [torch.cat(each.step(slope * each.gradient())).tolist() for _ in range(20)]
            for each in (one, other)
        )
        return through, again

    for through, again in run(2, select):
        assert through == again


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_back_at_the_start_it_begins_anew(run, kind: str) -> None:
    def select(world: Communicator) -> tuple[list[int], list[int]]:
        worker = Worker(world, KINDS[kind][0](), 4000)
        start = worker.sparsifier.state_dict().cloned()
        first = torch.cat(worker.step()).tolist()
        worker.step()
        worker.sparsifier.load_state_dict(start)
        again = Worker(world, worker.sparsifier, 4000)
        return first, torch.cat(again.step()).tolist()

    for first, again in run(2, select):
        assert first == again
