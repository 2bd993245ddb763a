"""Inside `averaged_model()` the model has the mean of the groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, JobError, Method, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import Topology, form
from references import batch, loss, one_step, vector
from references import model as make_model


def with_statistics() -> nn.Module:
    net = make_model()
    net[2] = nn.BatchNorm1d(7).double()
    return net


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)])
def test_inside_the_mean_outside_as_before(run, P: int, K: int) -> None:
    def looked_at(world: Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        topology, net = form(world, groups=P), with_statistics()
        inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, net, topology, hierarchical(100))
        for t in range(3):
            one_step(net, optimizer, topology, t)
        before, statistics = vector(net), net[2].running_mean.clone()
        with optimizer.averaged_model() as D:
            inside, mean_statistics = vector(net), net[2].running_mean.clone()
        assert torch.equal(before, vector(net))
        assert torch.equal(statistics, net[2].running_mean)
        expected = one_step(net, optimizer, topology, 3)  # training continues undisturbed
        assert not torch.equal(expected, before)
        return before, statistics, inside, mean_statistics, D

    ranks = run(P * K, looked_at)
    mean = torch.stack([before for before, *_ in ranks]).mean(0)
    mean_statistics = torch.stack([statistics for _, statistics, *_ in ranks]).mean(0)
    D = torch.stack([(before - mean).norm() for before, *_ in ranks]).mean().item()
    for *_, inside, statistics, noted in ranks:
        assert noted == pytest.approx(D, abs=1e-12)
        torch.testing.assert_close(inside, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(statistics, mean_statistics, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1)])
def test_what_the_block_writes_is_undone(run, P: int, K: int) -> None:
    """Writes in the block are undone, even with one group, where there is nothing to average."""

    def written(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world, groups=P), with_statistics()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, topology, hierarchical(100))
        one_step(net, optimizer, topology, 0)
        before = torch.cat([vector(net), net[2].running_mean])
        with optimizer.averaged_model(), torch.no_grad():
            for x in [*net.parameters(), net[2].running_mean]:
                x.clamp_(-0.01, 0.01)
        return before, torch.cat([vector(net), net[2].running_mean])

    for before, after in run(P * K, written):
        assert torch.equal(before, after)


class Assigning(nn.Module):
    """A model whose forward pass assigns a new buffer instead of writing into the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.register_buffer("running", torch.zeros(5).double())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running = 0.9 * self.running + 0.1 * x.mean(0).detach()
        return self.net(x - self.running)


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1)])
def test_buffers_that_are_assigned_anew(run, P: int, K: int) -> None:
    def looked_at(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world, groups=P), Assigning()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, hierarchical(100))
        for t in range(3):
            one_step(net, optimizer, topology, t)
        own, before = net.running, net.running.clone()
        with optimizer.averaged_model():
            inside = net.running.clone()
            net(batch(9, topology.rank)[0])
        assert net.running is own
        assert torch.equal(net.running, before)
        return before, inside

    ranks = run(P * K, looked_at)
    mean = torch.stack([before for before, _ in ranks]).mean(0)
    assert mean.abs().max() > 0
    for _, inside in ranks:
        torch.testing.assert_close(inside, mean, rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [2])
def test_a_buffer_that_one_rank_alone_has(run, n: int) -> None:
    def looked_at(world: Communicator) -> str:
        topology, net = form(world, groups=n), make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, hierarchical(100))
        if world.rank == 1:
            net.register_buffer("seen", torch.zeros(2))
        with pytest.raises(JobError) as error, optimizer.averaged_model():
            pass
        return str(error.value)

    told = "buffer seen is missing on rank 0 and of shape (2,) and torch.float32 on rank 1"
    assert run(n, looked_at) == [f"ranks 0 and 1 differ: {told}: give all ranks the same"] * n


class Halves(nn.Module):
    """Several models, of which a rank trains one, so that groups send their gradients at different times."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.of = nn.ModuleList(make_model(seed) for seed in range(parts))


def averaged(optimizer: DistributedOptimizer) -> None:
    with optimizer.averaged_model():
        pass


COLLECTIVE = [averaged, DistributedOptimizer.state_dict, DistributedOptimizer.gather_parameters]


@pytest.mark.parametrize("what", COLLECTIVE, ids=lambda what: what.__name__)
@pytest.mark.parametrize("method", [bsp, lambda: hierarchical(2)], ids=["bsp", "hierarchical"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("P", "K"), [(1, 4), (2, 2), (4, 1)])
def test_while_gradients_travel(
    run,
    P: int,
    K: int,
    parts: int,
    method: Callable[[], Method],
    what: Callable[[DistributedOptimizer], object],
) -> None:
    """Collectives on the same communicators do not disturb the reduction of gradients.

    This also holds between the backward passes of a step.
    """

    def trained(world: Communicator) -> list[Tensor]:
        topology = form(world, groups=P)
        return [weights(topology, between) for between in (lambda _: None, what)]

    def weights(topology: Topology, between: Callable[[DistributedOptimizer], object]) -> Tensor:
        net = Halves(parts)
        inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(
            inner, net, topology, method(), bucket_cap_mb=1e-4, gradient_accumulation_steps=2
        )
        for t in range(6):
            optimizer.zero_grad()
            for number in range(2):
                loss(net.of[topology.group_index % parts], *batch(2 * t + number, topology.rank)).backward()
                between(optimizer)
            optimizer.step()
        return vector(net)

    for undisturbed, found in run(P * K, trained):
        assert torch.equal(undisturbed, found)
