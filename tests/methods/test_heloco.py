"""Tests of HeLoCo with given orders of arrival, against the equations in numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd import UserError
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.methods import Method, async_diloco, heloco
from hpcsgd.methods.heloco import CorrectedNesterov, Correction
from hpcsgd.parts.averagers.by_tensor import ByTensor, TensorPart
from hpcsgd.parts.averagers.server_part import ServerPart
from hpcsgd.parts.averagers.server_rule import ServerRates
from methods.test_async_diloco import EVERY, STEPS, Turns, alone_in_order, asked, in_order, order_of
from methods.test_battery import OPTIMIZERS
from references import model, one_step, vector

LENGTHS = (6, 1, 11)
OURS = Correction(0.3, 1.0, 1.0, 0.5, 1.0)
STRONG = Correction(0.8, 3.0, 0.7, 4.0, 0.25)
"""With it updates are shrunk by the largest share, and turned all the way."""


class Reference:
    """The paper's server for the whole model, which corrects the elements of each block together."""

    def __init__(
        self, theta: np.ndarray, blocks: Sequence[np.ndarray], P: int, by: Correction, eta: float, mu: float
    ) -> None:
        self.theta, self.m = theta.copy(), np.zeros_like(theta)
        self.blocks, self.P, self.by, self.eta, self.mu = blocks, P, by, eta, mu
        self.cases = set[str]()

    def push(self, g: np.ndarray) -> np.ndarray:
        corrected = g.copy()
        for block in self.blocks:
            corrected[block] = self._corrected(g[block], self.m[block])
        self.m = self.mu * self.m + (1 - self.mu) * corrected
        self.theta -= self.eta / self.P * (corrected + self.mu * self.m)
        return self.theta.copy()

    def _corrected(self, delta: np.ndarray, m: np.ndarray) -> np.ndarray:
        by, length, of_m = self.by, np.linalg.norm(delta), np.linalg.norm(m)
        if length == 0 or of_m == 0:
            return delta
        u, v = delta / length, m / of_m
        c, confidence = float(u @ v), length / (length + by.momentum_weight * of_m)
        if c >= by.keep_from:
            self.cases.add("kept")
            return delta
        if c < 0:
            self.cases.add("shrunk")
            beta = min(by.shrink * -c * confidence, by.max_shrink)
            return delta - beta * c * length * v
        self.cases.add("turned")
        share = min(by.turn * (1 - c) * confidence, 1)
        turned = (1 - share) * u + share * v
        return length * turned / np.linalg.norm(turned)


def blocks_of(lengths: Sequence[int]) -> list[np.ndarray]:
    ends = itertools.accumulate(lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def tensors_of(blocks: Sequence[np.ndarray]) -> ByTensor:
    places = [slice(int(block[0]), int(block[-1]) + 1) for block in blocks]
    return ByTensor((), [TensorPart(i, 0, place) for i, place in enumerate(places)])


@pytest.mark.parametrize("by", [OURS, STRONG])
@pytest.mark.parametrize("seed", range(4))
def test_the_rule_in_drawn_orders(by: Correction, seed: int) -> None:
    chance, P, blocks = np.random.default_rng(seed), 3, blocks_of(LENGTHS)
    start = chance.normal(size=sum(LENGTHS))
    rule = CorrectedNesterov(ServerRates(0.6, 0.8, None), by)
    like = [torch.zeros(sum(LENGTHS), dtype=torch.float64)]
    part = ServerPart([torch.from_numpy(start)], like, tensors_of(blocks), P, None, rule)
    theirs = Reference(start, blocks, P, by, 0.6, 0.8)
    for t, group in enumerate(chance.integers(P, size=30)):
        g = chance.normal(size=len(start))
        expected = theirs.push(g)
        found = asked(part, int(group), torch.from_numpy(-g), t)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(rule.m[0].numpy(), theirs.m, rtol=0, atol=1e-13)
    assert theirs.cases == {"kept", "shrunk", "turned"}


@pytest.mark.parametrize("seed", range(5))
def test_what_the_correction_does(seed: int) -> None:
    """It takes away all that points against the momentum, or turns an update and keeps its length."""
    chance = np.random.default_rng(seed)
    m, delta = chance.normal(size=(2, 9))
    delta -= delta @ m / (m @ m) * m  # at a right angle to m
    sizes = float(np.linalg.norm(m)), float(np.linalg.norm(delta))

    def corrected(along: float, by: Correction) -> np.ndarray:
        """Return the correction of an update with this cosine to m."""
        update = along * m / sizes[0] + math.sqrt(1 - along**2) * delta / sizes[1]
        a, b = by.shares(float(np.linalg.norm(update)), sizes[0], float(update @ m))
        return a * update + b * m

    all_of_it = Correction(0.3, 1e9, 1.0, 0.5, 1.0)
    assert corrected(-0.4, all_of_it) @ m == pytest.approx(0, abs=1e-12)
    assert np.linalg.norm(corrected(-0.4, all_of_it)) == pytest.approx(math.sqrt(1 - 0.4**2))
    turned = corrected(0.2, OURS)
    assert np.linalg.norm(turned) == pytest.approx(1)
    assert turned @ m / sizes[0] > 0.21
    assert corrected(0.3001, OURS) @ m / sizes[0] == pytest.approx(0.3001)
    assert corrected(-0.4, Correction(0.0, 0.0, 1.0, 0.5, 1.0)) @ m / sizes[0] == pytest.approx(-0.4)


def test_without_a_momentum_an_update_stays() -> None:
    assert OURS.shares(2.0, 0.0, 0.0) == (1.0, 0.0)
    assert OURS.shares(0.0, 2.0, 0.0) == (1.0, 0.0)


def blocks_of_ranks(net: nn.Module, P: int, K: int) -> list[np.ndarray]:
    """Return the elements of each tensor that each rank's part has, as numbers of elements of `vector(net)`.

    The model is one bucket in backward order, cut into K shards of P parts.
    """
    params = list(net.parameters())
    starts = np.cumsum([0, *(p.numel() for p in params)])
    number = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in reversed(range(len(params)))])
    tensor = np.concatenate([np.full(params[i].numel(), i) for i in reversed(range(len(params)))])
    shard = -(-len(number) // K)
    blocks = list[np.ndarray]()
    for cut in range(0, len(number), shard):
        for part in np.array_split(np.arange(cut, cut + shard), P):
            own = part[part < len(number)]
            blocks += [number[own[tensor[own] == i]] for i in np.unique(tensor[own])]
    return blocks


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("by", [OURS, STRONG])
def test_a_training_in_a_drawn_order(run, P: int, K: int, by: Correction, optimizer: str) -> None:
    make, order = OPTIMIZERS[optimizer], order_of(P, 1)
    new = lambda: heloco(EVERY, 0.7, 0.9, **vars(by))  # noqa: E731
    ranks = run(P * K, lambda world: in_order(world, P, order, new(), make))
    server = Reference(vector(model()).numpy(), blocks_of_ranks(model(), P, K), P, by, 0.7, 0.9)
    expected, of_server = alone_in_order(P, K, order, server, make)
    for rank, (history, model_of_server) in enumerate(ranks):
        torch.testing.assert_close(history, expected[rank // K], rtol=0, atol=1e-12)
        torch.testing.assert_close(model_of_server, of_server, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1)])
def test_it_goes_on_to_the_same_bits(run, tmp_path: Path, P: int, K: int) -> None:
    """A resumed run has the server's momentum, without which later updates would not be corrected."""
    order, later = order_of(P, 5, 2), order_of(P, 6, 2)

    def both(world: Communicator) -> list[torch.Tensor]:
        def new(seed: int) -> tuple[nn.Module, DistributedOptimizer]:
            net = model(seed)
            inner = OPTIMIZERS["AdamW"](list(net.parameters()))
            return net, DistributedOptimizer(inner, net, topology, heloco(EVERY))

        def train(made: tuple[nn.Module, DistributedOptimizer], steps: range, turns: Turns) -> None:
            for t in steps:
                step = lambda t=t: one_step(*made, topology, t)  # noqa: E731
                turns.take(step) if (t + 1) % EVERY == 0 else step()

        topology = form(world, P)
        whole, turns, half = new(0), Turns(topology, order + later), STEPS // 2
        train(whole, range(half), turns)
        hpcsgd.save(tmp_path / "saved", whole[1])
        train(whole, range(half, STEPS), turns)
        resumed = new(1)
        hpcsgd.load(tmp_path / "saved", resumed[1])
        train(resumed, range(half, STEPS), Turns(topology, later))
        return [vector(whole[0]), vector(resumed[0])]

    for mine, resumed in run(P * K, both):
        assert torch.equal(mine, resumed)


@pytest.mark.threads
@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [async_diloco, heloco])
def test_a_checkpoint_of_the_other_server(
    run, tmp_path: Path, caplog: pytest.LogCaptureFixture, first: Callable[..., Method]
) -> None:
    """Its momentum is another quantity, so it does not go on."""
    then = heloco if first is async_diloco else async_diloco

    def train(world: Communicator) -> float:
        topology = form(world, groups=2)

        def trained(method: Method, steps: range, load: bool) -> DistributedOptimizer:
            net = model()
            made = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
            if load:
                hpcsgd.load(tmp_path / "saved", made)
            for t in steps:
                one_step(net, made, topology, t)
            return made

        hpcsgd.save(tmp_path / "saved", trained(first(EVERY), range(EVERY), load=False))
        averager: Any = trained(then(EVERY), range(EVERY, EVERY + 1), load=True).method.averager
        return float(averager.keeper.rule.m[0].norm())

    assert run(2, train) == [0.0, 0.0]
    assert (
        caplog.messages.count(
            "the server's momentum starts anew: the checkpoint was written with another method"
        )
        == 1
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"keep_from": 1.5}, "keep_from = 1.5: expected a cosine from 0 to 1"),
        ({"shrink": -1.0}, "shrink = -1.0: expected a finite number ≥ 0"),
        ({"turn": math.inf}, "turn = inf: expected a finite number ≥ 0"),
        ({"momentum_weight": -math.inf}, "momentum_weight = -inf: expected a finite number ≥ 0"),
        ({"max_shrink": 2.0}, "max_shrink = 2.0: expected a share from 0 to 1"),
        ({"outer_momentum": 1.0}, "outer_momentum = 1.0: expected a momentum ≥ 0 and < 1"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        heloco(EVERY, **wrong)
    assert str(caught.value) == told
