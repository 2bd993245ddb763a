"""DistributedDataParallel or FSDP1 around a model is refused, before and after wrapping."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hpcsgd import DistributedOptimizer, UserError, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import Topology, form
from references import model as make_model
from references import one_step

pytestmark = [pytest.mark.processes, pytest.mark.ranks(4)]


class Own(DistributedDataParallel):
    """A subclass that a user's script defines."""


def larger(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(nn.Sequential(net, nn.Linear(3, 3).double()))


def part(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net[0])  # type: ignore[index]


def replaced(net: nn.Module) -> nn.Module:
    net[0] = DistributedDataParallel(net[0])  # type: ignore[index, operator]
    return net


def sharded(net: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "its own class": Own,
    "a larger module": larger,
    "a part": part,
    "a part in its place": replaced,
    "FSDP1": sharded,
    "FSDP1 with its own parameters": lambda net: sharded(net, use_orig_params=True),
}
LINE = r"torch's {} is around the model of a DistributedOptimizer.* leave it out"


def line(kind: str) -> str:
    return LINE.format("FullyShardedDataParallel" if "FSDP1" in kind else "DistributedDataParallel")


def wrap(net: nn.Module, topology: Topology, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, hierarchical(2), **options)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Suppress FSDP1's deprecation warning."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", ["wrapper", "model"])
@pytest.mark.parametrize("kind", AROUND)
def test_before_the_wrapping(run, kind: str, given: str) -> None:
    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        topology.mesh()
        around = AROUND[kind](net)
        with pytest.raises(UserError, match=line(kind)):
            wrap(around if given == "wrapper" else net, topology)
        del around

    run(4, body)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", AROUND)
def test_frozen_objects_before_the_wrapping(run, kind: str) -> None:
    """The garbage collector does not list frozen objects, but the model that is given has the wrapper."""

    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        topology.mesh()
        around = AROUND[kind](net)
        gc.freeze()
        try:
            with pytest.raises(UserError, match=line(kind)):
                wrap(around, topology)
        finally:
            gc.unfreeze()

    run(4, body)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", AROUND)
def test_after_the_wrapping(run, kind: str, overlap: bool, steps: int) -> None:
    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        topology.mesh()
        optimizer = wrap(net, topology, overlap_grad_reduce=overlap)
        for t in range(steps):
            one_step(net, optimizer, topology, t)
        with pytest.raises(UserError, match=line(kind)):
            AROUND[kind](net)
        assert optimizer.t == steps

    run(4, body)


def test_a_wrapper_or_an_optimizer_that_is_gone(run) -> None:
    """A deleted wrapper or optimizer is ignored, even if only a garbage collection can free it."""

    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        topology.mesh()
        gc.disable()
        around: Any = DistributedDataParallel(net)
        around.itself = [around]
        del around
        optimizer: Any = wrap(net, topology)
        one_step(net, optimizer, topology, 0)
        optimizer.itself = [optimizer]
        del optimizer
        DistributedDataParallel(net)
        gc.enable()

    run(4, body)


def test_around_another_model(run) -> None:
    def body(world: Communicator) -> None:
        topology, net, other = form(world, 2), make_model(), make_model()
        topology.mesh()
        before = DistributedDataParallel(other)
        optimizer = wrap(net, topology)
        after = DistributedDataParallel(make_model())
        for t in range(2):
            one_step(net, optimizer, topology, t)
        assert before.module is other
        assert after is not before

    run(4, body)
