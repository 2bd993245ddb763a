"""Which parts of a training may be copied, and which are refused by name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from references import batch, loss, model, vector

COPIES: dict[str, Callable[[nn.Module, Any], object]] = {
    "copy": lambda net, optimizer: copy.copy(optimizer),
    "deepcopy": lambda net, optimizer: copy.deepcopy(optimizer),
    "deepcopy with the model": lambda net, optimizer: copy.deepcopy({"model": net, "optimizer": optimizer}),
    "pickle": lambda net, optimizer: pickle.dumps(optimizer),
    "torch.save": lambda net, optimizer: torch.save({"optimizer": optimizer}, io.BytesIO()),
}


def made(world: Communicator, P: int) -> tuple[nn.Module, Any]:
    net = model()
    inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, DistributedOptimizer(inner, net, form(world, P), hpcsgd.hierarchical(2))


def train(world: Communicator, net: nn.Module, optimizer: Any, steps: range) -> None:
    for t in steps:
        optimizer.zero_grad()
        loss(net, *batch(t, world.rank)).backward()
        optimizer.step()


@pytest.mark.threads(unless={"K": 2})
@pytest.mark.parametrize(("P", "K"), [(1, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_the_optimizer_is_refused_and_training_goes_on(run, kind: str, P: int, K: int) -> None:
    def body(world: Communicator) -> None:
        net, optimizer = made(world, P)
        train(world, net, optimizer, range(2))
        with pytest.raises(UserError, match=r"cannot be copied or pickled: save optimizer\.state_dict\(\)"):
            COPIES[kind](net, optimizer)
        train(world, net, optimizer, range(2, 4))
        other, untouched = made(world, P)
        train(world, other, untouched, range(4))
        assert torch.equal(vector(net), vector(other))

    run(P * K, body)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("P", [1, 2])
def test_a_copy_of_the_model_is_a_model_of_its_own(run, P: int) -> None:
    """A script may copy the model, for example to keep a moving average of the parameters."""

    def body(world: Communicator) -> None:
        net, optimizer = made(world, P)
        train(world, net, optimizer, range(2))
        other, before = copy.deepcopy(net), vector(net)
        train(world, net, optimizer, range(2, 4))
        assert torch.equal(vector(other), before)
        assert not torch.equal(vector(net), before)
        with torch.no_grad():
            for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
                theirs.lerp_(mine, 0.5)
        loss(other, *batch(0, world.rank)).backward()
        torch.testing.assert_close(vector(other), (before + vector(net)) / 2)

    run(2, body)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_saved_of_a_part_is_the_part_alone(run, dtype: torch.dtype) -> None:
    """Saving a part does not save the whole bucket in which it lies."""

    def body(world: Communicator) -> None:
        alone, net = (nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3)).to(dtype) for _ in range(2))
        inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, net, form(world, 1), hpcsgd.bsp())
        net(torch.ones(2, 300, dtype=dtype)).sum().backward()
        optimizer.step()
        for part in (lambda m: m[1].state_dict(), lambda m: m[1], lambda m: [*m.parameters()][-1]):
            assert saved(part(net)) <= saved(part(alone)) + 200
        theirs = torch.load(io.BytesIO(written(net.state_dict())))
        assert all(torch.equal(value, theirs[name]) for name, value in net.state_dict().items())

    run(2, body)


def test_safetensors_finds_no_shared_memory(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    world = threads.run(1, lambda world: world)[0]
    net, _ = made(world, 1)
    safetensors.save_model(net, tmp_path / "model.safetensors")
    other = model()
    safetensors.load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(vector(net), vector(other))


def written(x: object) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


def saved(x: object) -> int:
    """Return the number of bytes of the saved file."""
    return len(written(x))
