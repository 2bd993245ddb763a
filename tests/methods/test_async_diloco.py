"""Tests of asynchronous DiLoCo with given orders of arrival.

The table of methods has it with groups that wait for each other.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from ahead import others_made
from hpcsgd import UserError, outer_schedules
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import Topology, form
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.methods import Method, async_diloco, diloco
from hpcsgd.methods.async_diloco import DelayedNesterov
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.averagers.server_part import ServerPart
from hpcsgd.parts.averagers.server_rule import ServerRates
from hpcsgd.parts.schedules import DynamicLocalSteps
from methods.invariants import tallying
from methods.test_battery import OPTIMIZERS
from references import MakeOptimizer, distributed, gathered_step, model, one_step, set_vector, vector

EVERY, ROUNDS = 2, 4
STEPS = EVERY * ROUNDS
M = 13


class Server(Protocol):
    """A server of the whole model: its model, and what it does with a pseudo-gradient."""

    theta: np.ndarray

    def push(self, g: np.ndarray) -> np.ndarray:
        """Return the new model."""
        ...


class Reference:
    """The paper's server for the whole model, written in numpy."""

    def __init__(
        self, theta: np.ndarray, N: int, epsilon: float = 0.7, beta: float = 0.9, c: float = 0.0
    ) -> None:
        self.theta, self.m, self.delta = theta.copy(), np.zeros_like(theta), np.zeros_like(theta)
        self.N, self.epsilon, self.beta, self.c, self.t = N, epsilon, beta, c, 0

    def push(self, g: np.ndarray) -> np.ndarray:
        N, c, momentum = self.N, self.c, self.beta * self.m
        self.delta += g
        self.t += 1
        if self.t % N == 0:
            self.m = self.beta * self.m + self.delta / N
            momentum = self.beta * self.m
            self.theta -= self.epsilon * ((1 - c * N + c) * momentum + g / N)
            self.delta[:] = 0
        else:
            self.theta -= self.epsilon * (c * momentum + g / N)
        return self.theta.copy()


def asked(part: ServerPart, group: int, update: Tensor, t: int) -> Tensor:
    """Send this change of the group's model to the server, and return its answer."""
    message = MessageBuffer.like([update])
    message.pack([update], 1.0, t)
    ((to, answer),) = part(group, message.bytes)
    assert to == group
    read = torch.empty_like(update)
    message.received(answer).unpack([read])
    return read


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("N", [None, 1, 2, 5])
def test_the_rule_in_drawn_orders(N: int | None, spread: float, seed: int) -> None:
    chance, P = np.random.default_rng(seed), 3
    start = chance.normal(size=M)
    like = [torch.zeros(M, dtype=torch.float64)]
    rule = DelayedNesterov(ServerRates(0.6, 0.8, None), N, spread)
    part = ServerPart([torch.from_numpy(start)], like, ByTensor((), ()), P, None, rule)
    theirs = Reference(start, N or P, 0.6, 0.8, spread / (N or P))
    for t, group in enumerate(chance.integers(P, size=20)):
        g = chance.normal(size=M)
        expected = theirs.push(g)
        found = asked(part, int(group), torch.from_numpy(-g), t)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(rule.m[0].numpy(), theirs.m, rtol=0, atol=1e-13)
    np.testing.assert_allclose(rule.delta[0].numpy(), theirs.delta, rtol=0, atol=1e-13)


def test_a_buffer_of_one_update_is_torchs_nesterov_to_the_bit() -> None:
    chance = torch.Generator().manual_seed(1)
    theta = torch.randn(M, generator=chance)
    rule = DelayedNesterov(ServerRates(0.7, 0.9, None), None, 0.0)
    part = ServerPart([theta], [theta], ByTensor((), ()), 1, None, rule)
    outer = theta.clone().requires_grad_()
    optimizer = optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for t in range(6):
        outer.grad = torch.randn(M, generator=chance)
        found = asked(part, 0, -outer.grad, t)
        optimizer.step()
        assert torch.equal(found, outer.detach())


def order_of(P: int, seed: int, rounds: int = ROUNDS) -> list[int]:
    """Return a random order of synchronizations, in which each group occurs `rounds` times."""
    order = [g for g in range(P) for _ in range(rounds)]
    random.Random(seed).shuffle(order)
    return order


class Turns:
    """Lets groups synchronize in a given order: each waits for a message of the group before it."""

    def __init__(self, topology: Topology, order: Sequence[int]) -> None:
        self._peers, self._order, self._me = (
            topology.inter_group.dup_with_thread(),
            order,
            topology.group_index,
        )
        self._mine = [k for k, g in enumerate(order) if g == self._me]

    def take(self, step: Callable[[], object]) -> None:
        """Make `step` when it is this group's turn."""
        k, token = self._mine.pop(0), torch.zeros(1)
        if k and self._order[k - 1] != self._me:
            self._peers.recv(token, self._order[k - 1]).wait()
        step()
        if k + 1 < len(self._order) and self._order[k + 1] != self._me:
            self._peers.send(token, self._order[k + 1]).wait()


def in_order(
    world: Communicator, P: int, order: Sequence[int], method: Method, make: MakeOptimizer
) -> tuple[list[Tensor], Tensor]:
    """Return this group's parameters after each step, and the server's parameters at the end."""
    topology, net = form(world, P), model()
    optimizer = DistributedOptimizer(make(list(net.parameters())), net, topology, method)
    turns, history = Turns(topology, order), []
    for t in range(STEPS):
        step = lambda t=t: history.append(one_step(net, optimizer, topology, t))  # noqa: E731
        turns.take(step) if (t + 1) % EVERY == 0 else step()
    with optimizer.averaged_model():
        return history, vector(net)


def alone_in_order(
    P: int, K: int, order: Sequence[int], server: Server, make: MakeOptimizer
) -> tuple[list[list[Tensor]], Tensor]:
    """Return the same, computed in one process: parameters as [group][step], and the server's."""
    nets = [model() for _ in range(P)]
    optimizers = [make(list(net.parameters())) for net in nets]
    read, made = [server.theta.copy() for _ in range(P)], [0] * P
    history: list[list[Tensor]] = [[] for _ in range(P)]
    for g in order:
        for _ in range(EVERY):
            gathered_step(nets[g], optimizers[g], made[g], range(g * K, (g + 1) * K))
            made[g] += 1
            history[g].append(vector(nets[g]))
        read[g] = server.push(read[g] - vector(nets[g]).numpy())
        set_vector(nets[g], torch.from_numpy(read[g]))
        history[g][-1] = vector(nets[g])
    return history, torch.from_numpy(server.theta)


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
@pytest.mark.parametrize(("P", "K", "N", "spread"), [(2, 1, None, 0.0), (3, 1, 2, 0.5), (2, 2, 3, 1.0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_training_in_a_drawn_order(
    run, P: int, K: int, N: int | None, spread: float, optimizer: str, seed: int
) -> None:
    make, order = OPTIMIZERS[optimizer], order_of(P, seed)
    new = lambda: async_diloco(EVERY, buffer_size=N, momentum_spread=spread)  # noqa: E731
    ranks = run(P * K, lambda world: in_order(world, P, order, new(), make))
    reference = Reference(vector(model()).numpy(), N or P, c=spread / (N or P))
    expected, server = alone_in_order(P, K, order, reference, make)
    for rank, (history, model_of_server) in enumerate(ranks):
        torch.testing.assert_close(history, expected[rank // K], rtol=0, atol=1e-12)
        torch.testing.assert_close(model_of_server, server, rtol=0, atol=1e-12)


@pytest.mark.parametrize("K", [1, 2])
def test_one_group_trains_as_with_diloco(run, K: int) -> None:
    make = OPTIMIZERS["momentum"]
    mine = run(K, lambda world: distributed(world, 1, async_diloco(EVERY), make, STEPS))
    theirs = run(K, lambda world: distributed(world, 1, diloco(EVERY), make, STEPS))
    for history, other in zip(mine, theirs, strict=True):
        assert all(torch.equal(w, v) for w, v in zip(history, other, strict=True))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_slow_group_does_not_hold_up_the_other(run, tmp_path: Path) -> None:
    """The fast group makes all its steps, every second with a synchronization, while the slow one waits."""

    def trained(world: Communicator) -> int:
        topology = form(world, groups=2)
        net, optimizer = tallying(topology, async_diloco(2), 9)

        def step(t: int) -> None:
            net.mark(topology.group_index, t)
            optimizer.step()

        step(0)
        world.barrier()
        return others_made(world, tmp_path, step, range(1, 9), 8)

    assert run(2, trained)[1] == 8


class Clock:
    """A group's clock, which advances only when a test sets it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        return self.now


def at_speeds(
    world: Communicator,
    P: int,
    H: int,
    speeds: Callable[[int, int], float],
    steps: int,
    min_steps: int = 1,
    evaluate: Sequence[int] = (),
) -> tuple[list[int], dict[int, float]]:
    """Train, where step t takes `speeds(rank, t)` seconds.

    Returns:
        The steps after which this group synchronized, and its recorded number of local steps at each.
    """
    topology, net, clock = form(world, P), model(), Clock(0.0)
    method = async_diloco(H, local_steps=DynamicLocalSteps(min_steps, clock))
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.01), net, topology, method)
    synced, noted = [], {}
    for t in range(1, steps + 1):
        clock.now += speeds(world.rank, t)
        one_step(net, optimizer, topology, t)
        if "staleness" in optimizer.metrics:
            synced.append(t)
            noted[t] = optimizer.metrics["local_steps"]
        if t in evaluate:
            with optimizer.averaged_model():
                clock.now += 100.0  # during an evaluation, which waits for the other groups
        world.barrier()
    return synced, noted


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_a_group_of_half_the_speed_takes_half_the_steps(run, P: int, K: int) -> None:
    """Local steps follow eq. 6. The group that synchronizes first knows only its own speed at that time."""
    ranks = run(P * K, at_speeds, P, 8, lambda rank, t: float(1 + rank // K), 24)
    for rank, (synced, noted) in enumerate(ranks):
        fast = rank < K
        assert noted[synced[-1]] == (8 if fast else 4)
        assert synced[-3:] == ([8, 16, 24] if fast else [16, 20, 24])


@pytest.mark.ranks(4)
def test_ranks_of_a_group_take_as_many_steps(run) -> None:
    """The clocks of a group's ranks differ a little; the clock of its first rank counts."""
    ranks = run(4, at_speeds, 2, 8, lambda rank, t: (1.0, 1.1, 2.0, 3.5)[rank], 24)
    assert [noted[synced[-1]] for synced, noted in ranks] == [8, 8, 4, 4]
    assert ranks[0][0] == ranks[1][0]
    assert ranks[2][0] == ranks[3][0]


@pytest.mark.ranks(3)
def test_speeds_may_change(run) -> None:
    """From step 13 on the slow group is the fast one. A third group has a speed that is no round fraction."""
    seconds = [(1.0, 4.0), (4.0, 1.0), (1.7, 1.7)]
    ranks = run(3, at_speeds, 3, 6, lambda g, t: seconds[g][t > 12], 48)
    assert [noted[synced[-1]] for synced, noted in ranks] == [1, 6, 3]


@pytest.mark.ranks(2)
def test_no_group_takes_fewer_steps_than_the_fewest(run) -> None:
    ranks = run(2, at_speeds, 2, 8, lambda g, t: (1.0, 100.0)[g], 24, 3)
    assert [noted[synced[-1]] for synced, noted in ranks] == [8, 3]


@pytest.mark.ranks(2)
def test_time_in_which_groups_wait_for_each_other_does_not_count(run) -> None:
    ranks = run(2, at_speeds, 2, 4, lambda g, t: float(1 + g), 24, 1, (3, 7, 13, 14, 18))
    assert all(set(noted.values()) <= {4, 2} for _, noted in ranks)  # 4 while only its own is known
    assert [noted[synced[-1]] for synced, noted in ranks] == [4, 2]


@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_groups_that_never_wait_evaluate_after_unlike_numbers_of_steps(run, P: int, K: int) -> None:
    """A slow group need not make as many steps as the others, but calls that save or average need it."""

    def train(world: Communicator) -> tuple[list[float], str]:
        topology, net = form(world, P), model()
        optimizer = DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.01), net, topology, async_diloco(EVERY)
        )
        for t in range(1, EVERY * (1 + 2 * topology.group_index) + 1):
            one_step(net, optimizer, topology, t)
        with optimizer.averaged_model():
            evaluated = vector(net).tolist()
        with pytest.raises(UserError) as refused:
            optimizer.average_models()
        return evaluated, str(refused.value)

    (first, told), *others = run(P * K, train)
    assert all(evaluated == first for evaluated, _ in others)
    assert "after 2 updates, but rank" in told
    assert told.split("but ")[1].startswith(f"rank {K} is in average_models() after 6 updates")


@pytest.mark.ranks(2)
def test_ranks_of_a_group_evaluate_after_the_same_number_of_steps(run) -> None:
    def train(world: Communicator) -> str:
        topology, net = form(world, 1), model()
        optimizer = DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.01), net, topology, async_diloco(EVERY)
        )
        optimizer._step.t += world.rank
        with pytest.raises(UserError) as refused, optimizer.averaged_model():
            pass
        return str(refused.value)

    for told in run(2, train):
        assert "averaged_model() after 0 updates, but rank 1 is in averaged_model() after 1" in told


Resumed = tuple[Tensor, Tensor, dict[str, Any]]


def started(
    world: Communicator, P: int, seed: int, N: int | None = None, local_steps: Any = None
) -> tuple[nn.Module, DistributedOptimizer, Topology]:
    topology, net = form(world, P), model(seed)
    inner = OPTIMIZERS["AdamW"](list(net.parameters()))
    method = async_diloco(EVERY + 1, buffer_size=N, local_steps=local_steps)
    return net, DistributedOptimizer(inner, net, topology, method), topology


@pytest.mark.ranks(2)
def test_what_is_saved_is_of_one_moment(run) -> None:
    """A rank reads the server's state only while the server is at rest.

    A group that has saved trains on, and its next update may arrive before another rank has saved.
    """

    def train(world: Communicator) -> list[bool]:
        net, topology = model(0), form(world, groups=2)
        method = async_diloco(EVERY)
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, method)
        for t in range(EVERY):
            one_step(net, optimizer, topology, t)
        averager: Any = method.averager
        link = averager._link
        resting, seen = list[bool](), list[bool]()
        at_rest, numbers = link._service.at_rest, link.keeper.rule.numbers

        @contextlib.contextmanager
        def watched():
            with at_rest():
                resting.append(True)
                yield
                resting.clear()

        def noted():
            seen.append(bool(resting))
            return numbers()

        with (
            mock.patch.object(link._service, "at_rest", watched),
            mock.patch.object(link.keeper.rule, "numbers", noted),
        ):
            method.state_dict()
        return seen

    assert run(2, train) == [[True]] * 2


@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("at", [4, 6])
@pytest.mark.parametrize("by_speed", [False, True])
def test_it_goes_on_to_the_same_bits(run, tmp_path: Path, P: int, K: int, at: int, by_speed: bool) -> None:
    """A run resumes to the same bits from a state saved between two synchronizations or after one.

    The buffer of the momentum is half full then.
    """
    last, every = 12, EVERY + 1
    order = order_of(P, 5, last // every)
    first = [order_of(P, 5, at // every), order_of(P, 6, last // every - at // every)]
    order = first[0] + first[1]

    def both(world: Communicator) -> tuple[Tensor, ...]:
        def new(seed: int) -> tuple[nn.Module, DistributedOptimizer, Topology]:
            local = DynamicLocalSteps(clock=Clock(0.0)) if by_speed else None
            return started(world, P, seed, N=P + 1, local_steps=local)

        def train(made: Any, steps: range, turns: Turns) -> None:
            net, optimizer, topology = made
            for t in steps:
                step = lambda t=t: one_step(net, optimizer, topology, t)  # noqa: E731
                turns.take(step) if (t + 1) % every == 0 else step()

        def end(made: Any) -> tuple[Tensor, Tensor]:
            mine = vector(made[0])
            with made[1].averaged_model():
                return mine, vector(made[0])

        whole = new(0)
        turns = Turns(whole[2], order)
        train(whole, range(at), turns)
        hpcsgd.save(tmp_path / "saved", whole[1])
        train(whole, range(at, last), turns)
        resumed = new(1)
        hpcsgd.load(tmp_path / "saved", resumed[1])
        train(resumed, range(at, last), Turns(resumed[2], first[1]))
        return *end(whole), *end(resumed)

    for mine, server, resumed, resumed_server in run(P * K, both):
        assert torch.equal(mine, resumed)
        assert torch.equal(server, resumed_server)


@pytest.mark.ranks(2)
def test_the_number_of_local_steps_goes_on(run, tmp_path: Path) -> None:
    """Groups still know each other's speed: the fast group has not synchronized since the restart."""

    def both(world: Communicator) -> list[int]:
        topology = form(world, groups=2)
        slow = topology.group_index

        def new() -> tuple[nn.Module, DistributedOptimizer, Clock]:
            net, clock = model(), Clock(0.0)
            method = async_diloco(8, local_steps=DynamicLocalSteps(clock=clock))
            inner = optim.SGD(net.parameters(), lr=0.01)
            return net, DistributedOptimizer(inner, net, topology, method), clock

        def train(made: Any, steps: range) -> list[int]:
            net, optimizer, clock = made
            synced = []
            for t in steps:
                clock.now += 1 + slow
                one_step(net, optimizer, topology, t)
                synced += [t] if "staleness" in optimizer.metrics else []
                world.barrier()
            return synced

        before = new()
        train(before, range(1, 19))
        hpcsgd.save(tmp_path / "saved", before[1])
        after = new()
        hpcsgd.load(tmp_path / "saved", after[1])
        return train(after, range(19, 33))

    fast, slow = run(2, both)
    assert fast == [24, 32]
    assert slow in ([20, 24, 28, 32], [22, 26, 30])


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_on_another_shape_a_buffer_of_another_size_starts_anew(
    run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A buffer of another size starts empty, and a message says so.

    θ and the momentum stay, and the groups continue from the mean of their models.
    """
    caplog.set_level(logging.WARNING)

    def both(world: Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        net, optimizer, topology = started(world, 2, 0, N=4)
        turns = Turns(topology, order_of(2, 3, 1))
        for t in range(4):
            step = lambda t=t: one_step(net, optimizer, topology, t)  # noqa: E731
            turns.take(step) if t == EVERY else step()
        hpcsgd.save(tmp_path / "saved", optimizer)
        mean = vector(net)
        world.allreduce(mean, "mean").wait()
        with optimizer.averaged_model():
            theta = vector(net)
        net, optimizer, topology = started(world, 4, 1, N=3)
        hpcsgd.load(tmp_path / "saved", optimizer)
        own = vector(net)
        with optimizer.averaged_model():
            before = vector(net)
        one_step(net, optimizer, topology, 4)
        return mean, theta, own, before, optimizer.method.state_dict()["averager"].replicated

    for mean, theta, own, before, numbers in run(4, both):
        torch.testing.assert_close(own, mean, rtol=0, atol=1e-14)
        torch.testing.assert_close(before, theta, rtol=0, atol=1e-14)
        assert numbers == {"buffered": 0, "buffer_size": 3}
    told = [record.getMessage() for record in caplog.records if "async_diloco" in record.getMessage()]
    assert set(told) <= {
        "async_diloco: the buffer of the momentum starts anew: it is for 3 updates now, and it was for 4 and "
        "had 2"
    }
    assert len(told) <= 1


def test_speeds_on_another_shape_start_anew_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    dynamic = lambda: DynamicLocalSteps(clock=Clock(0.0))  # noqa: E731

    def save(world: Communicator) -> None:
        net, optimizer, topology = started(world, 2, 0, local_steps=dynamic())
        for t in range(4):
            one_step(net, optimizer, topology, t)
        hpcsgd.save(tmp_path / "saved", optimizer)

    def load(world: Communicator) -> None:
        hpcsgd.load(tmp_path / "saved", started(world, 3, 1, local_steps=dynamic())[1])

    threads.run(2, save)
    threads.run(3, load)
    assert [record.getMessage() for record in caplog.records if "anew" in record.getMessage()] == [
        "on 3 × 1 ranks these start anew: local_steps, since_sync, seconds of schedule, seconds of averager"
    ]


@pytest.mark.threads
@pytest.mark.ranks(2)
def test_a_group_that_dies_ends_the_job(run) -> None:
    """The other group sends a request and gets an error, instead of waiting forever."""

    class Gone(Exception):
        pass

    def trained(world: Communicator) -> None:
        topology, net = form(world, groups=2), model()
        inner = optim.SGD(net.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, net, topology, async_diloco(1))
        for t in range(1000):
            if world.rank == 1 and t == 3:
                raise Gone("in the middle")
            one_step(net, optimizer, topology, t)
        with optimizer.averaged_model():
            pass

    with pytest.raises(Exception, match="in the middle"):
        run(2, trained)


REFUSED: dict[str, Callable[[], Any]] = {
    "sync_every = 0: groups average after at least 1 step": lambda: async_diloco(0),
    "outer_lr = 0.0: expected a finite rate > 0": lambda: async_diloco(2, outer_lr=0.0),
    "outer_lr = inf: expected a finite rate > 0": lambda: async_diloco(2, outer_lr=float("inf")),
    "outer_momentum = 1.0: expected a momentum ≥ 0 and < 1": lambda: async_diloco(2, outer_momentum=1.0),
    "buffer_size = 0: expected a number of updates ≥ 1": lambda: async_diloco(2, buffer_size=0),
    "momentum_spread = 1.5: expected a share from 0 to 1": lambda: async_diloco(2, momentum_spread=1.5),
    "max_staleness = -1: a group may be 0 or more updates ahead of the slowest": lambda: async_diloco(
        2, max_staleness=-1
    ),
    "max_staleness = 1: expected none with local_steps, because a fast group at its end would hold up slow "
    "ones for ever": lambda: async_diloco(2, max_staleness=1, local_steps=DynamicLocalSteps()),
    "min_steps = 0: groups train at least 1 step between two synchronizations": lambda: DynamicLocalSteps(0),
    "min_steps = 5: expected at most sync_every = 4": lambda: async_diloco(
        4, local_steps=DynamicLocalSteps(5)
    ),
    "outer_schedule: its rate is 0 at step 2, where groups synchronize: they would lose what they have "
    "learned; let the schedule begin earlier": lambda: async_diloco(
        2, outer_schedule=outer_schedules.pier(100, begin=0.2)
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(line: str) -> None:
    with pytest.raises(UserError) as refused:
        REFUSED[line]()
    assert str(refused.value) == line
