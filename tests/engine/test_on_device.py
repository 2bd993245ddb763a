"""The optimizer on a device: its state, clipping, loss scaling, and gradients from several streams."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map

import hpcsgd
from far.ranks import PATTERNS, explicitly
from hpcsgd.comm import Communicator, threads
from hpcsgd.comm.on_host import on_host
from hpcsgd.core.norm import clip, squared_norm
from hpcsgd.core.topology import form
from hpcsgd.methods import Method, bsp, hierarchical, sasgd, ssp
from references import batch, loss, model, vector
from trainings import Training

pytestmark = pytest.mark.usefixtures("far_device")

HOST = torch.device("cpu")


def tensors(state: dict[str, Any]) -> dict[tuple[int, str], Tensor]:
    return {
        (i, name): value
        for i, values in state["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def moved(state: Any) -> Any:
    """Return the state as `torch.load(…, map_location="cpu")` would."""
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, state)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "ASGD", "NAdam", "whole tensors"])
def test_a_state_dict_goes_on_also_by_way_of_the_host(optimizer: str) -> None:
    def both(world: Communicator, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole, resumed = (Training(form(world), optimizer, seed=seed, device=device) for seed in (0, 1))
        whole.steps(3)
        resumed.net.load_state_dict(copy.deepcopy(whole.net.state_dict()))
        resumed.optimizer.load_state_dict(moved(copy.deepcopy(whole.optimizer.state_dict())))
        resumed.t = whole.t
        for training in (whole, resumed):
            training.steps(2)
        return whole.everything(), resumed.everything()

    for whole, resumed in threads.run(2, explicitly(both)):
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            assert torch.equal(value, resumed[name]), name


def test_the_state_dict_has_tensors_where_torch_has_them() -> None:
    def places(world: Communicator, device: torch.device) -> dict[tuple[int, str], torch.device]:
        training = Training(form(world), "AdamW", device=device)
        training.steps(1)
        return {name: value.device for name, value in tensors(training.optimizer.state_dict()).items()}

    for rank, found in enumerate(threads.run(2, explicitly(places))):
        assert {name for _, name in found} == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        for (_, name), device in found.items():
            assert device == (HOST if name == "step" else torch.device("far", rank)), name


@pytest.mark.parametrize("make", [lambda: sasgd(3), lambda: hpcsgd.diloco(3)])
def test_the_state_of_a_method_comes_back_to_the_device(make: Any) -> None:
    def both(world: Communicator, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole, resumed = (Training(form(world, 2), "plain", make, seed=s, device=device) for s in (0, 1))
        whole.steps(2)
        resumed.net.load_state_dict(copy.deepcopy(whole.net.state_dict()))
        resumed.optimizer.load_state_dict(moved(copy.deepcopy(whole.optimizer.state_dict())))
        resumed.t = whole.t
        for training in (whole, resumed):
            training.steps(2)
        return whole.everything(), resumed.everything()

    for whole, resumed in threads.run(2, explicitly(both)):
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def clipped(world: Communicator, most: float, device: torch.device = HOST) -> tuple[Tensor, list[Tensor]]:
    net = model().to(device)
    optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), bsp())
    x, y = (part.to(device) for part in batch(0, world.rank))
    (nn.functional.cross_entropy(net[0](x), y % 3)).backward()
    norm = optimizer.clip_grad_norm_(most)
    return norm, [b.g.clone() for b in optimizer.buckets]


@pytest.mark.parametrize("most", [0.1, 100.0])
def test_clipping_is_that_of_the_host(most: float) -> None:
    here, there = threads.run(2, clipped, most), threads.run(2, explicitly(clipped), most)
    for (norm, mine), (expected, theirs) in zip(there, here, strict=True):
        assert torch.equal(norm, expected)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_nobody_waits_for_a_norm() -> None:
    x = torch.randn(3 << 16, generator=torch.Generator().manual_seed(0))
    there = x.to("far:0")
    torch.ops.far.forget_waits()
    norm = clip([there], 1.0, 2.0, None)
    squared = squared_norm(there)
    assert torch.ops.far.waits(0) == []
    assert torch.equal(norm.cpu(), clip([x], 1.0, 2.0, None))
    assert torch.equal(squared.cpu(), squared_norm(x))


@pytest.mark.parametrize("method", [hierarchical(1000), ssp(0)])
def test_a_loss_is_kept_unread(method: Method) -> None:
    def stepped(world: Communicator) -> None:
        net = nn.Linear(3, 1)
        optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), method)
        net(torch.ones(1, 3)).sum().backward()
        unreadable = torch.ones((), device="meta")
        assert optimizer.step(loss=unreadable) is unreadable

    threads.run(1, stepped)


def scaled(world: Communicator, device: torch.device = HOST) -> tuple[Tensor, float, int]:
    net = model(dtype=torch.float32).to(device)
    inner = optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, 2), hierarchical(2), bucket_cap_mb=1e-4)
    scaler = hpcsgd.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    for t in range(6):
        optimizer.zero_grad()
        value = loss(net, *(part.to(device) for part in batch(t, world.rank, torch.float32)))
        scaler.scale(value * (float("inf") if (t, world.rank) == (3, 1) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    return vector(net), scaler.get_scale(), optimizer.t


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["none", "default stream slow", "all others slow"])
def test_all_skip_the_same_steps(pattern: str) -> None:
    here, there = threads.run(4, scaled), threads.run(4, explicitly(scaled, PATTERNS[pattern]))
    for mine, theirs in zip(there, here, strict=True):
        assert mine[1:] == theirs[1:]
        assert mine[2] == 5
        assert torch.allclose(mine[0], theirs[0], rtol=1e-5)


def two_branches(world: Communicator, side_is_slow: bool, device: torch.device = HOST) -> Tensor:
    """Train two branches, of which one and its gradients are computed on a separate stream."""
    net = nn.ModuleList([nn.Linear(30, 30), nn.Linear(30, 30)])
    generator = torch.Generator().manual_seed(world.rank)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    net.to(device)
    optimizer = hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.01), net, form(world), bsp())
    side = main = None
    if device != HOST:
        main, side = torch.accelerator.current_stream(device), torch.Stream(device)
        torch.ops.far.delay(device.index, (side if side_is_slow else main).stream_id, 3000)
    for _ in range(3):
        x = torch.randn(8, 30, generator=generator).to(device)
        optimizer.zero_grad()
        if main is not None and side is not None:
            side.wait_stream(main)
        with nullcontext() if side is None else side:
            aside = net[1](x).square().mean()
        here = net[0](x).square().mean()
        if main is not None and side is not None:
            main.wait_stream(side)
        (here + aside).backward()
        optimizer.step()
    return vector(net)


@pytest.mark.parametrize("side_is_slow", [True, False])
def test_gradients_of_one_bucket_come_on_two_streams(side_is_slow: bool) -> None:
    here = threads.run(2, two_branches, side_is_slow)
    there = threads.run(2, explicitly(two_branches), side_is_slow)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(there, here, strict=True))


def test_what_is_on_the_host_is_not_copied() -> None:
    x, y = torch.ones(3), torch.ones(3, device="far:0")
    made = on_host({"x": x, "rest": [(y, 2), "text"]})
    assert made["x"] is x
    (copied, number), text = made["rest"]
    assert (number, text) == (2, "text")
    assert copied.is_cpu
    assert torch.equal(copied, x)
