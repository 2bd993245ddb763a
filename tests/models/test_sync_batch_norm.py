"""Batch norm over a group equals that of all its samples in one process: values, gradients, statistics."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
from torch import Tensor, nn, optim
from torch.nn.utils import prune

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.models.sync_batch_norm import SyncBatchNorm, sync_batch_norm

COUNTS = [4, 1, 7]
"""The number of samples of each rank."""
SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "rows": (nn.BatchNorm1d, ()),
    "sequences": (nn.BatchNorm1d, (5,)),
    "images": (nn.BatchNorm2d, (3, 2)),
    "volumes": (nn.BatchNorm3d, (2, 3, 2)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cumulative": {"momentum": None},
    "without weights": {"affine": False},
    "without statistics": {"track_running_stats": False},
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3 + 5


def layer_of(shape: str, **settings: Any) -> Any:
    layer: Any = SHAPES[shape][0](2, **settings).double()
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(drawn(70, 2))
            layer.bias.copy_(drawn(71, 2))
    return layer


def batches(shape: str, t: int) -> list[Tensor]:
    return [drawn(10 * t + rank, count, 2, *SHAPES[shape][1]) for rank, count in enumerate(COUNTS)]


def passed(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of the input for a loss that weights each element differently."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y.square() * y.detach().cos()).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.ranks(3)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_batch_norm_of_all_samples(run, shape: str, settings: str) -> None:
    def body(world: Communicator) -> dict[str, Any]:
        layer = sync_batch_norm(layer_of(shape, **SETTINGS[settings]), form(world, 1))
        steps = [passed(layer, batches(shape, t)[world.rank]) for t in range(3)]
        layer.eval()
        return {
            "steps": steps,
            "gradients": [p.grad for p in layer.parameters()],
            "buffers": dict(layer.named_buffers()),
            "evaluated": layer(batches(shape, 9)[0]).detach() if world.rank == 0 else None,
        }

    whole, found = layer_of(shape, **SETTINGS[settings]), list(run(3, body))
    for t in range(3):
        y, dx = passed(whole, torch.cat(batches(shape, t)))
        for n, expected in enumerate((y, dx)):
            torch.testing.assert_close(torch.cat([each["steps"][t][n] for each in found]), expected)
    for number, param in enumerate(whole.parameters()):
        torch.testing.assert_close(sum(each["gradients"][number] for each in found), param.grad)
    for each in found:
        assert each["buffers"].keys() == dict(whole.named_buffers()).keys()
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(each["buffers"][name], buffer)
    torch.testing.assert_close(found[0]["evaluated"], whole.eval()(batches(shape, 9)[0]))  # by rank 0 alone


def test_large_means_lose_no_digits() -> None:
    """In float32, a variance from a difference of squares would be only rounding errors."""

    def body(world: Communicator) -> Tensor:
        layer = sync_batch_norm(nn.BatchNorm1d(2), form(world, 1))
        return layer((drawn(world.rank, 64, 2) + 1e4).float()).detach()

    y = torch.cat(threads.run(3, body))
    torch.testing.assert_close(y.mean(0), torch.zeros(2), atol=1e-3, rtol=0)
    torch.testing.assert_close(y.std(0, unbiased=False), torch.ones(2), atol=1e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_samples_have_statistics_of_32(dtype: torch.dtype) -> None:
    def body(world: Communicator) -> Tensor:
        layer = sync_batch_norm(nn.BatchNorm1d(2), form(world, 1))
        y = layer(drawn(world.rank, 5, 2).to(dtype))
        assert y.dtype == dtype
        y.sum().backward()
        return y.detach()

    y = torch.cat(threads.run(2, body))
    x = torch.cat([drawn(rank, 5, 2).to(dtype) for rank in range(2)]).float()
    torch.testing.assert_close(y, nn.BatchNorm1d(2)(x).to(dtype).detach())


@pytest.mark.threads
@pytest.mark.parametrize(("P", "K"), [(1, 3), (2, 2)])
def test_a_group_trains_as_one_process_with_its_batch(run, P: int, K: int) -> None:
    def made() -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
        with torch.no_grad():
            for number, param in enumerate(net.parameters()):
                param.copy_(drawn(number, *param.shape) / 5)
        return net

    def trained(net: nn.Module, optimizer: Any, samples: list[list[Tensor]]) -> dict[str, Tensor]:
        for xs in samples:
            optimizer.zero_grad()
            net(torch.cat(xs)).square().mean().backward()
            optimizer.step()
        return {name: x.clone() for name, x in net.state_dict().items()}

    def body(world: Communicator) -> dict[str, Tensor]:
        topology = form(world, P)
        net = sync_batch_norm(made(), topology)
        inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, hpcsgd.hierarchical(100))
        return trained(net, optimizer, [[drawn(10 * t + world.rank, 4, 3)] for t in range(4)])

    for rank, mine in enumerate(run(P * K, body)):
        group = range(rank // K * K, rank // K * K + K)
        net = made()
        whole = trained(
            net,
            optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            [[drawn(10 * t + r, 4, 3) for r in group] for t in range(4)],
        )
        for name, value in whole.items():
            torch.testing.assert_close(mine[name], value)


def test_every_layer_is_replaced_once_and_nothing_else() -> None:
    world = threads.run(1, lambda world: world)[0]
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.SyncBatchNorm(2).eval()))
    net.append(net[1])
    names, tensors = list(net.state_dict()), list(itertools.chain(net.parameters(), net.buffers()))
    assert sync_batch_norm(net, form(world, 1)) is net
    assert [type(module) for module in net] == [nn.Linear, SyncBatchNorm, nn.Sequential, SyncBatchNorm]
    assert net[1] is net[3]
    assert net[1].training
    assert not net[2][0].training
    assert list(net.state_dict()) == names
    assert all(a is b for a, b in zip(itertools.chain(net.parameters(), net.buffers()), tensors, strict=True))
    with pytest.raises(UserError, match="Linear has no BatchNorm1d, 2d, 3d or SyncBatchNorm"):
        sync_batch_norm(nn.Linear(2, 2), form(world, 1))


def test_torchs_own_is_refused_where_it_would_know_no_group() -> None:
    def body(world: Communicator) -> None:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        inner, topology = optim.SGD(net.parameters(), lr=0.1), form(world, 1)
        with pytest.raises(hpcsgd.JobError, match=r"1 is torch's SyncBatchNorm.* hpcsgd\.sync_batch_norm"):
            hpcsgd.DistributedOptimizer(inner, net, topology, hpcsgd.bsp())
        copied = sync_batch_norm(copy.deepcopy(net), topology)
        hpcsgd.DistributedOptimizer(optim.SGD(copied.parameters(), lr=0.1), copied, topology, hpcsgd.bsp())

    threads.run(2, body)


def test_a_copy_goes_by_the_same_ranks_and_pickling_is_refused() -> None:
    def body(world: Communicator) -> tuple[Tensor, Tensor]:
        net = sync_batch_norm(nn.Sequential(nn.BatchNorm1d(2).double()), form(world, 1))
        other = copy.deepcopy(net)
        with pytest.raises(UserError, match=r"cannot be pickled: save its state_dict\(\)"):
            pickle.dumps(net)
        x = drawn(world.rank, 5, 2)
        return net(x).detach(), other(x).detach()

    for mine, copied in threads.run(2, body):
        assert torch.equal(mine, copied)


class Tenfold(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch calls it so
        return 10 * super().forward(input)


def with_a_forward() -> nn.Module:
    layer: Any = nn.BatchNorm1d(2)
    layer.forward = lambda x: x
    return layer


def parametrized() -> nn.Module:
    layer = nn.BatchNorm1d(2)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


MORE = {
    "a subclass": (lambda: Tenfold(2), "1 is a Tenfold"),
    "a lazy one": (nn.LazyBatchNorm1d, "1 is a LazyBatchNorm1d"),
    "parametrized": (parametrized, "1 is a ParametrizedBatchNorm1d"),
    "pruned": (
        lambda: prune.identity(nn.BatchNorm1d(2), "weight"),
        "1 has weights that are computed from other parameters",
    ),
    "a forward of its own": (with_a_forward, "1 has a forward of its own"),
}


@pytest.mark.parametrize("kind", MORE)
def test_what_is_more_than_batch_norm_is_refused(kind: str) -> None:
    """The error is raised before any layer is replaced."""
    made, line = MORE[kind]
    net = nn.Sequential(nn.BatchNorm1d(2), made())
    world = threads.run(1, lambda world: world)[0]
    with pytest.raises(UserError, match=rf"sync_batch_norm: layer {line}.*: only plain BatchNorm1d"):
        sync_batch_norm(net, form(world, 1))
    assert type(net[0]) is nn.BatchNorm1d
    with pytest.raises(UserError, match="layer Tenfold is a Tenfold"):
        sync_batch_norm(Tenfold(2), form(world, 1))


def test_a_layer_keeps_its_hooks() -> None:
    seen: list[str] = []
    net = nn.Sequential(nn.BatchNorm1d(2))
    net[0].register_forward_hook(lambda *_: seen.append("forward"))
    net[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    before = net[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    world = threads.run(1, lambda world: world)[0]
    for _ in range(2):  # the second time, layer 0 is replaced already
        net.append(nn.BatchNorm1d(2))
        sync_batch_norm(net, form(world, 1))
    x = drawn(1, 4, 2).float().requires_grad_()
    net(x).sum().backward()
    assert seen == ["before", "forward", "backward"]
    before.remove()
    net(x)
    assert seen[3:] == ["forward"]
