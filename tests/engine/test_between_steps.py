"""Calls that are refused inside `averaged_model()` and between the backward passes of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError

Optimizer = hpcsgd.DistributedOptimizer
SHAPES = pytest.mark.parametrize(("P", "K"), [(2, 1), (1, 2), (2, 2)])


class WithEval(optim.SGD):
    """An optimizer with methods that change the weights, as Schedule-Free has."""

    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(2)


def made(world: Communicator, P: int, of: type[optim.SGD] = optim.SGD, **options: Any) -> Optimizer:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inner = of(net.parameters(), lr=0.1, momentum=0.9)
    return Optimizer(inner, net, form(world, P), hpcsgd.hierarchical(sync_every=4), **options)


def backward(optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(10 * seed + optimizer.topology.rank)
    optimizer.model(torch.randn(4, 3, generator=generator)).square().sum().backward()


def weights(optimizer: Optimizer) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in optimizer.model.parameters()])


CALLS: dict[str, Callable[[Optimizer, Path], Any]] = {
    "step()": lambda optimizer, _: optimizer.step(),
    "average_models()": lambda optimizer, _: optimizer.average_models(),
    "averaged_model()": lambda optimizer, _: optimizer.averaged_model().__enter__(),
    "save()": lambda optimizer, folder: hpcsgd.save(folder, optimizer),
    "load()": lambda optimizer, folder: hpcsgd.load(folder, optimizer),
    "eval()": lambda optimizer, _: optimizer.eval(),
}


@pytest.mark.parametrize("call", CALLS)
@SHAPES
def test_inside_averaged_it_is_refused(tmp_path: Path, P: int, K: int, call: str) -> None:
    def body(world: Communicator) -> None:
        optimizer = made(world, P, WithEval)
        backward(optimizer, 1)
        optimizer.step()
        before = weights(optimizer)
        with optimizer.averaged_model():
            with pytest.raises(UserError) as told:
                CALLS[call](optimizer, tmp_path)
            assert f"{call} inside averaged_model(): the model is the mean of all groups there" in str(
                told.value
            )
        assert torch.equal(weights(optimizer), before)
        assert optimizer.t == 1
        CALLS["average_models()"](optimizer, tmp_path)

    threads.run(P * K, body)
    assert not any(tmp_path.iterdir())


def test_a_block_that_was_made_before_another_one_is_refused_in_it() -> None:
    def body(world: Communicator) -> None:
        optimizer = made(world, 2)
        block = optimizer.averaged_model()
        with (
            optimizer.averaged_model(),
            pytest.raises(UserError, match=r"averaged_model\(\) inside averaged_model\(\)"),
            block,
        ):
            pass
        with pytest.raises(KeyError), optimizer.averaged_model():
            raise KeyError
        optimizer.average_models()

    threads.run(2, body)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("call", ["save()", "load()"])
@SHAPES
def test_after_some_of_the_backward_passes_it_is_refused(
    tmp_path: Path, P: int, K: int, call: str, overlap: bool
) -> None:
    def body(world: Communicator) -> None:
        optimizer = made(world, P, gradient_accumulation_steps=3, overlap_grad_reduce=overlap)
        folder = tmp_path / "checkpoints"
        CALLS[call](optimizer, tmp_path / "other")
        for step in range(2):
            for passes in (1, 2):
                backward(optimizer, passes)
                with pytest.raises(UserError) as told:
                    CALLS[call](optimizer, folder)
                assert f"{call} after {passes} of the 3 backward passes of a step" in str(told.value)
                assert not folder.exists()
            backward(optimizer, 3)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.t == step + 1
        backward(optimizer, 4)
        optimizer.zero_grad()
        CALLS[call](optimizer, tmp_path / "other")
        backward(optimizer, 5)
        optimizer.model.zero_grad()
        CALLS[call](optimizer, tmp_path / "other")

    threads.run(P * K, body)


@pytest.mark.parametrize("of", [optim.SGD, WithEval])
def test_refused_by_one_rank_it_is_refused_by_all(tmp_path: Path, of: type[optim.SGD]) -> None:
    def body(world: Communicator) -> None:
        optimizer = made(world, 2, of, gradient_accumulation_steps=2)
        if world.rank == 1:
            backward(optimizer, 1)
        with pytest.raises(UserError, match=r"rank 1 of 2, save\(\): save\(\) after 1 of the 2"):
            hpcsgd.save(tmp_path, optimizer)

    threads.run(2, body)
