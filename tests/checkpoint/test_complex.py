"""Saved complex parameters are restored on the same ranks and on other ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from engine.test_complex import Moduli, adamw, momentum
from engine.test_complex_state import same_states, steps_once
from hpcsgd import DistributedOptimizer, UserError
from hpcsgd.checkpoint import Checkpoints, restore_model
from hpcsgd.checkpoint.in_scripts import load, save
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.methods import Method
from hpcsgd.methods.diloco import OuterOptimizer
from hpcsgd.parts.averagers import MeanOfAll
from hpcsgd.parts.averagers.outer_step import NESTEROV
from hpcsgd.parts.grad_reduces import AllReduce, Sparse
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.sparsifiers import TopK
from references import vector
from spectral import Operator

CASES: dict[str, tuple[Callable[[Any], optim.Optimizer], Callable[[], Method], dict[str, Any]]] = {
    "momentum": (momentum, hpcsgd.bsp, {}),
    "AdamW": (adamw, hpcsgd.bsp, {}),
    "whole tensors": (adamw, hpcsgd.bsp, {"elementwise": False, "tensorwise": True}),
    "whole models": (adamw, hpcsgd.bsp, {"elementwise": False}),
    "real state": (lambda params: Moduli(params, 0.01), hpcsgd.bsp, {"elementwise": True}),
    "masters": (momentum, hpcsgd.bsp, {"master_dtype": torch.float64}),
    "diloco": (momentum, lambda: hpcsgd.diloco(sync_every=2), {}),
    "outer steps of whole models": (
        momentum,
        lambda: Method(AllReduce(), Every(2), OuterOptimizer(MeanOfAll(), NESTEROV, lambda _: None)),
        {},
    ),
    "sparse": (momentum, lambda: hpcsgd.bsp(Sparse(TopK(0.3))), {}),
}
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]


def made(world: Communicator, P: int, case: str, seed: int) -> tuple[nn.Module, DistributedOptimizer]:
    make, method, options = CASES[case]
    dtype = torch.float32 if case == "masters" else torch.float64
    net = Operator(pairs=False, seed=seed, dtype=dtype)
    inner = make(list(net.parameters()))
    return net, DistributedOptimizer(inner, net, form(world, P), method(), **options)


def some_steps(net: nn.Module, optimizer: DistributedOptimizer, ranks: list[int], count: int) -> None:
    dtype = next(p.dtype for p in net.parameters() if not p.is_complex())
    for _ in range(count):
        if dtype == torch.float64:
            steps_once(net, optimizer, ranks)
        else:
            optimizer.zero_grad()
            net(torch.ones(2, 5)).tanh().sum().backward()
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_the_same_ranks_go_on_to_the_same_bits(run, tmp_path: Path, case: str, P: int, K: int) -> None:
    def one(world: Communicator) -> tuple[list[Tensor], bool]:
        found = []
        net, optimizer = made(world, P, case, 0)
        some_steps(net, optimizer, [world.rank], 3)
        save(tmp_path, optimizer)
        again, resumed = made(world, P, case, 1)
        load(tmp_path, resumed)
        for each, theirs in ((net, optimizer), (again, resumed)):
            some_steps(each, theirs, [world.rank], 3)
            found.append(vector(each))
        return found, same_states(optimizer.state_dict(), resumed.state_dict())

    for (whole, resumed), alike in run(P * K, one):
        assert torch.equal(whole, resumed)
        assert alike


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("before", "P", "K"), [((1, 2), 1, 3), ((1, 3), 1, 1), ((1, 1), 2, 2), ((2, 2), 1, 2), ((1, 2), 3, 1)]
)
@pytest.mark.threads
def test_other_ranks_have_the_same(
    run, tmp_path: Path, case: str, before: tuple[int, int], P: int, K: int
) -> None:
    """The model and the optimizer state are restored; they are the same in all groups when saved."""

    def saved(world: Communicator) -> tuple[Tensor, dict[str, Any]]:
        net, optimizer = made(world, before[0], case, 0)
        some_steps(net, optimizer, [0], 2)  # all groups are the same afterwards
        save(tmp_path, optimizer)
        return vector(net), optimizer.state_dict()

    def loaded(world: Communicator) -> tuple[Tensor, dict[str, Any]]:
        net, optimizer = made(world, P, case, 1)
        load(tmp_path, optimizer)
        return vector(net), optimizer.state_dict()

    expected, state = threads.run(before[0] * before[1], saved)[0]
    for found, theirs in run(P * K, loaded):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
        assert same_states(state, theirs)


@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 1)])
@pytest.mark.threads
def test_one_process_has_the_model(tmp_path: Path, P: int, K: int) -> None:
    """A single process restores the model, and a model with real parameters refuses the checkpoint."""

    def saved(world: Communicator) -> Tensor:
        net, optimizer = made(world, P, "momentum", 0)
        some_steps(net, optimizer, [0], 2)
        save(tmp_path, optimizer)
        return vector(net)

    expected = threads.run(P * K, saved)[0]
    checkpoint = threads.run(1, lambda world: Checkpoints(tmp_path, form(world)).newest())[0]
    assert checkpoint is not None
    net = Operator(pairs=False, seed=1)
    restore_model(checkpoint, net)
    torch.testing.assert_close(vector(net), expected, rtol=0, atol=1e-15)
    real = Operator(pairs=False)
    real.bias = nn.Parameter(torch.ones(5))
    with pytest.raises(
        UserError, match=r"parameter bias: complex numbers, \[5\] in the checkpoint, \[5\] in"
    ):
        restore_model(checkpoint, real)
