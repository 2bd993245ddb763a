"""Tests of NoLoCo: outer steps in pairs of groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.state import State
from hpcsgd.core.topology import form
from hpcsgd.core.waits import Pairs
from hpcsgd.errors import UserError
from hpcsgd.methods import noloco
from hpcsgd.methods.noloco import PairOuterStep
from local_methods import paired
from methods.test_battery import OPTIMIZERS
from references import alone, distributed, model, one_step, same
from train.test_parts import made

EVERY, STEPS = 2, 13


@pytest.mark.threads(unless={"P": 3, "K": 2, "alpha": 0.5})
@pytest.mark.parametrize(("P", "K"), [(2, 3), (3, 1), (3, 2), (5, 1), (6, 1)])
@pytest.mark.parametrize(("alpha", "beta", "gamma"), [(0.5, 0.7, 0.75), (0.0, 1.0, 1.9), (0.8, 0.3, 0.05)])
def test_equals_its_equations(run, P: int, K: int, alpha: float, beta: float, gamma: float) -> None:
    """There are enough synchronizations to leave out every group if P is odd; some shards have padding."""
    make = OPTIMIZERS["AdamW"]

    def models(world: Communicator) -> list[Tensor]:
        method = noloco(EVERY, alpha, beta, gamma, seed=7)
        return distributed(world, P, method, make, STEPS, bucket_cap_mb=3e-4)

    same(run(P * K, models), alone(P, K, make, STEPS, paired(EVERY, alpha, beta, gamma, seed=7)), K)


@pytest.mark.parametrize("P", [2, 3, 4, 7, 8])
def test_each_group_averages_with_one_other_or_is_left_alone_in_turn(P: int) -> None:
    averaged = set()
    for t in range(60):
        found = Pairs(seed=1, every=1).partners(t, P)
        assert all(found[partner] == g != partner for g, partner in found.items())
        assert set(range(P)) - found.keys() == ({t % P} if P % 2 else set())
        averaged |= set(found.items())
    assert averaged == set(itertools.permutations(range(P), 2))


def test_partners_follow_from_seed_and_step() -> None:
    draws = [Pairs(1, every=1).partners(t, 8) for t in range(20)]
    assert draws == [Pairs(1, every=1).partners(t, 8) for t in range(20)]
    assert draws != [Pairs(2, every=1).partners(t, 8) for t in range(20)]
    assert draws[0] != draws[1]


@pytest.mark.parametrize(("P", "K"), [(2, 2), (3, 1), (3, 2), (4, 1)])
def test_a_synchronization_sends_one_shard_to_one_other(run, P: int, K: int) -> None:
    """A rank sends a shard and one number at a synchronization, and nothing to other groups between them."""

    def sent(world: Communicator) -> list[float]:
        topology, net = form(world, P), nn.Linear(24, 16, bias=False)
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, noloco(EVERY))
        counts = []
        for t in range(6 * EVERY):
            before = world.stats.totals()
            optimizer.zero_grad()
            net(optimizer.buckets[0].w.new_full((2, 24), t + topology.rank)).sum().backward()
            optimizer.step()
            grown = world.stats.since(before).get("model_average")
            counts.append(0.0 if grown is None else grown.bytes)
        return counts

    for rank, counts in enumerate(run(P * K, sent)):
        expected = [0.0] * (6 * EVERY)
        for number in range(1, 7):
            left_alone = P % 2 == 1 and number % P == rank // K
            expected[number * EVERY - 1] = 0.0 if left_alone else 24 * 16 / K * 4 + 8
        assert counts == expected


@pytest.mark.ranks(2)
def test_two_groups_with_gamma_one_and_no_momentum_take_the_mean(run) -> None:
    """φ_i moves to the mean of the pair, and θ moves all the way there: this is local SGD."""
    method = lambda: noloco(EVERY, alpha=0.0, beta=1.0, gamma=1.0)  # noqa: E731
    plain = lambda: hpcsgd.hierarchical(EVERY)  # noqa: E731
    make = OPTIMIZERS["momentum"]
    ours, theirs = (run(2, lambda w, m=m: distributed(w, 2, m(), make, STEPS)) for m in (method, plain))
    same(ours, list(zip(*theirs, strict=True)), 1)


def all_pairings(groups: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield every way to form pairs of groups; if their number is odd, one group is alone."""
    if len(groups) % 2:
        for i, g in enumerate(groups):
            yield from ([(g,), *rest] for rest in all_pairings(groups[:i] + groups[i + 1 :]))
        return
    if not groups:
        yield []
        return
    first, *others = groups
    for i, partner in enumerate(others):
        yield from ([(first, partner), *rest] for rest in all_pairings(others[:i] + others[i + 1 :]))


def growth(P: int, alpha: float, gamma: float) -> float:
    """Return the growth factor of the second moments of φ and δ at a synchronization, for Δ = 0.

    The moments are taken about the means of the groups.
    """
    apart = np.eye(P) - np.full((P, P), 1 / P)
    moments, drawn = np.zeros(((2 * P) ** 2,) * 2), list(all_pairings(list(range(P))))
    for pairing in drawn:
        together = np.zeros((P, P))
        for some in pairing:
            together[np.ix_(some, some)] = 1 / len(some)
        delta = np.hstack([-gamma * (np.eye(P) - together), alpha * np.eye(P)])
        phi = np.hstack([np.eye(P), np.zeros((P, P))]) + delta
        step = np.kron(np.eye(2), apart) @ np.vstack([phi, delta])
        moments += np.kron(step, step) / len(drawn)
    return float(abs(np.linalg.eigvals(moments)).max())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("P", [2, 3, 4, 5, 6])
def test_groups_stay_together_within_the_bound_and_no_further(P: int, alpha: float) -> None:
    """The average is over all pairings with equal probability, without any assumption of the derivation."""
    kappa = 0.5 if P % 2 else P / (2 * (P - 1))
    bound = 2 * (1 - alpha**2) / (1 + alpha - 2 * alpha * kappa)
    assert bound >= 2 * (1 - alpha**2) - 1e-12
    assert growth(P, alpha, 0.999 * bound) < 1 < growth(P, alpha, 1.001 * bound)
    how = noloco(1, alpha).averager
    assert isinstance(how, PairOuterStep)
    assert growth(P, alpha, how.gamma) < 0.97


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "sync_every = 0: groups average after at least 1 step"),
        ({"alpha": 1.0}, "alpha = 1.0: expected a momentum ≥ 0 and < 1"),
        ({"alpha": -0.1}, "alpha = -0.1: expected a momentum"),
        ({"alpha": float("nan")}, "alpha = nan: expected a number"),
        ({"beta": 0.0}, "beta = 0.0: expected an outer learning rate > 0"),
        ({"beta": float("inf")}, "beta = inf: expected"),
        (
            {"gamma": 1.5},
            r"gamma = 1.5: expected more than 0 and less than 2·\(1 − alpha²\) = 1.5, ",
        ),
        ({"gamma": 0.0}, "gamma = 0.0: expected more than 0"),
        ({"alpha": 0.9, "gamma": 0.5}, r"gamma = 0.5: .* = 0.38, or groups diverge"),
    ],
)
def test_refusals(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        noloco(**{"sync_every": 2, **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_job_file_gives_the_constants(tmp_path: Path) -> None:
    how = made(tmp_path, 'name = "noloco"\nsync_every = 4\nalpha = 0.6\ngamma = 0.5\nseed = 3\n').averager
    assert (how.pairs, how.alpha, how.beta, how.gamma) == (Pairs(seed=3, every=4), 0.6, 0.7, 0.5)
    with pytest.raises(UserError, match=r"\[method\]: gamma = 1.4: .* less than 2·\(1 − alpha²\) = 1.28"):
        made(tmp_path, 'name = "noloco"\nsync_every = 4\nalpha = 0.6\ngamma = 1.4\n')


@pytest.mark.ranks(3)
def test_phi_and_delta_are_of_the_own_shard_and_wide(run) -> None:
    def kept(world: Communicator) -> list[str]:
        topology, net = form(world, 3), model().bfloat16()
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, noloco(1))
        assert optimizer.method.state_dict()["averager"] == State()
        for p in net.parameters():
            p.grad = p.detach().clone()
        optimizer.step()
        shards = optimizer.method.state_dict()["averager"].sharded
        assert sum(x.numel() for x in shards["phi"]) == sum(b.param_shard.numel() for b in optimizer.buckets)
        return [f"{name} {x.dtype}" for name, vectors in shards.items() for x in vectors]

    assert run(3, kept) == [["phi torch.float32", "delta torch.float32"]] * 3


@pytest.mark.ranks(4)
def test_it_is_evaluated_by_the_mean_of_all_groups(run) -> None:
    def means(world: Communicator) -> tuple[Tensor, Tensor, float]:
        topology, net = form(world, 4), model()
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, noloco(2))
        for t in range(5):
            own = one_step(net, optimizer, topology, t)
        with optimizer.averaged_model() as D:
            return own, nn.utils.parameters_to_vector(net.parameters()).detach().clone(), D

    found = run(4, means)
    for _, mean, D in found:
        np.testing.assert_allclose(mean, np.mean([own.numpy() for own, *_ in found], 0), atol=1e-12)
        assert D > 1e-4
