"""Quantized gradients and parameters: properties of every quantizer, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.state import State
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, bsp, hierarchical, osgp, switch
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers import MeanOfAll
from hpcsgd.parts.grad_reduces import AllToAll, Quantized
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.quantizers.whole import Whole
from hpcsgd.parts.schedules import Every
from references import batch, loss, model, vector

SHAPES = [(1, 3), (2, 2), (3, 2)]
DICE = quantizers.int4(block=8, rounding=quantizers.Stochastic(seed=3))


def momentum(params: Sequence[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


def trained(
    world: Communicator,
    P: int,
    new: Callable[[], Method],
    dtype: torch.dtype = torch.float32,
    steps: int = 5,
    **options: Any,
) -> list[Tensor]:
    """Return the parameters after each step, in `dtype`."""
    net, topology = model(dtype=dtype), form(world, P)
    optimizer = hpcsgd.DistributedOptimizer(momentum(list(net.parameters())), net, topology, new(), **options)
    history = []
    for t in range(5):
        optimizer.zero_grad()
        loss(net, *batch(t, world.rank, dtype)).backward()
        optimizer.step()
        history.append(vector(net))
    return history


@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize("wire", [None, Whole()], ids=["none", "float32"])
def test_without_rounding_the_bits_are_those_of_all_to_all(
    run, wire: Quantizer | None, P: int, K: int
) -> None:
    plain = run(P * K, trained, P, lambda: hierarchical(2))
    packed = run(P * K, trained, P, lambda: hierarchical(2, Quantized(gradients=wire)))
    for mine, theirs in zip(packed, plain, strict=True):
        assert all(torch.equal(w, v) for w, v in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize(
    "wire",
    [quantizers.fp16(), quantizers.int8(8), quantizers.int4(8), DICE],
    ids=["fp16", "int8", "int4", "dice"],
)
def test_by_the_same_seed_the_same_bits_on_all_positions(run, wire: Quantizer, P: int, K: int) -> None:
    """Buckets have one layer each and are sent during the backward pass."""
    runs = [
        run(P * K, lambda world: trained(world, P, lambda: bsp(Quantized(wire, wire)), bucket_cap_mb=1e-4))
        for _ in range(2)
    ]
    first = runs[0][0]
    for found in (each for ranks in runs for each in ranks):
        assert all(torch.equal(w, v) for w, v in zip(found, first, strict=True))


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "wire", [quantizers.bf16(), quantizers.int8(8), quantizers.int4(8)], ids=["bf16", "int8", "int4"]
)
def test_updates_too_small_for_the_wire_arrive(run, wire: Quantizer, dtype: torch.dtype) -> None:
    """Small updates are not lost.

    In each step one element of a block moves by 1. The others move by a thousandth, which the quantizer
    cannot represent next to it. After many steps all are within one step's move of the exact values.
    """
    steps, size = 400, 24
    rates = torch.full((size,), 1e-3)
    rates[::8] = 1.0

    def one(world: Communicator) -> Tensor:
        net = nn.Module()
        net.w = nn.Parameter(torch.zeros(size, dtype=dtype))
        topology = form(world, 1)
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=1.0), net, topology, hierarchical(2, Quantized(parameters=wire)),
            master_dtype=None if dtype == torch.float32 else torch.float32,
        )  # fmt: skip
        for t in range(steps):
            net.w.grad = None
            (net.w * rates.to(dtype) * (-1) ** (t % 2 * (rates == 1))).sum().backward()
            optimizer.step()
        return net.w.detach().float()

    for w in run(3, one):
        torch.testing.assert_close(w, -rates * steps * (rates < 1), rtol=0.01, atol=0.08)


@pytest.mark.ranks(1)
def test_what_is_known_alone_comes_home_where_a_group_is_of_one(run) -> None:
    def one(world: Communicator) -> tuple[Tensor, Tensor]:
        net, topology = model(dtype=torch.float32), form(world, 1)
        grad_reduce = Quantized(parameters=quantizers.int8())
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.0), net, topology, hierarchical(2, grad_reduce)
        )
        (bucket,) = optimizer.buckets
        before = bucket.param_shard.clone()
        grad_reduce.load_state_dict(
            State(replicated={"t": 0}, sharded={"parameters": [torch.ones_like(before)]})
        )
        optimizer.step()
        optimizer.step()
        return before, bucket.param_shard.clone()

    before, after = run(1, one)[0]
    assert torch.equal(after, before + 1)


@pytest.mark.ranks(2)
def test_optimizers_of_whole_tensors_train_and_say_that_parameters_do_not_travel(run, caplog) -> None:
    def one(world: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        found = []
        for grad_reduce in (Quantized(None, quantizers.int4()), AllToAll()):
            net, topology = model(dtype=torch.float32), form(world, 1)
            optimizer = hpcsgd.DistributedOptimizer(
                momentum(list(net.parameters())),
                net,
                topology,
                hierarchical(2, grad_reduce),
                elementwise=False,
            )
            loss(net, *batch(0, world.rank, torch.float32)).backward()
            optimizer.step()
            found.append(vector(net))
        return found[0], found[1]

    for packed, plain in run(2, one):
        assert torch.equal(packed, plain)


@pytest.mark.ranks(2)
def test_synchronizations_of_whole_models_are_refused(run) -> None:
    def one(world: Communicator) -> None:
        net = model()
        method = Method(Quantized(parameters=quantizers.int8()), Every(2), MeanOfAll())
        hpcsgd.DistributedOptimizer(momentum(list(net.parameters())), net, form(world, 1), method)

    with pytest.raises(UserError, match="averages whole models"):
        run(2, one)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("gradients", "refused"),
    [(None, False), (quantizers.bf16(), False), (DICE, False), (quantizers.int8(), True)],
)
def test_loss_scales_go_with_what_keeps_nothing(run, gradients: Quantizer | None, refused: bool) -> None:
    def one(world: Communicator) -> None:
        net, topology = model(dtype=torch.float32), form(world, 1)
        method = hierarchical(2, Quantized(gradients, quantizers.int8()))
        optimizer = hpcsgd.DistributedOptimizer(momentum(list(net.parameters())), net, topology, method)
        scaler = hpcsgd.GradScaler("cpu", init_scale=4.0)
        scaler.scale(loss(net, *batch(0, world.rank, torch.float32))).backward()
        scaler.step(optimizer)

    if refused:
        with pytest.raises(UserError, match="would have several scales"):
            run(2, one)
    else:
        run(2, one)


@pytest.mark.ranks(2)
def test_infinite_gradients_arrive_as_such(run) -> None:
    def one(world: Communicator) -> Tensor:
        net, topology = model(dtype=torch.float32), form(world, 1)
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=1.0),
            net,
            topology,
            hierarchical(2, Quantized(quantizers.int8())),
            overlap_grad_reduce=False,
        )
        loss(net, *batch(0, world.rank, torch.float32)).backward()
        if world.rank == 1:
            next(net.parameters()).grad = torch.full((7, 5), torch.inf)
        optimizer.step()
        return vector(net)

    for w in run(2, one):
        assert not w.isfinite().all()


@dataclass(frozen=True)
class Mute(Whole):
    """A quantizer that sends zeros."""

    def decode(self, code: Tensor, out: Tensor) -> None:
        out.zero_()


@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2)])
def test_the_last_step_of_a_gradient_reduction_tells_all_that_was_kept(run, P: int, K: int) -> None:
    method = lambda: switch(bsp(Quantized(None, Mute())), bsp(Quantized(None, Mute())), at=3)  # noqa: E731
    for found in run(P * K, trained, P, method):
        start = vector(model(dtype=torch.float32))
        assert all(torch.equal(found[t], start) for t in (0, 1))
        assert (found[2] != start).float().mean() > 0.9
        assert all(torch.equal(found[t], found[2]) for t in (3, 4))


@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2)])
def test_gradient_reductions_that_take_turns(run, P: int, K: int) -> None:
    """One reduction's error feedback does not affect the other; a fine quantizer changes little."""

    def new(grad_reduce: Callable[[], Any]) -> Method:
        return switch(bsp(grad_reduce()), hierarchical(2, grad_reduce()), at=3)

    plain = run(P * K, trained, P, lambda: new(AllToAll))
    packed = run(P * K, trained, P, lambda: new(lambda: Quantized(parameters=quantizers.bf16())))
    for mine, theirs in zip(packed, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2)])
def test_one_gradient_reduction_in_both_turns(run, P: int, K: int) -> None:
    """The result is that of two instances: at the switch it begins again."""

    def shared() -> Method:
        grad_reduce = Quantized(parameters=quantizers.int8(block=8))
        return switch(hierarchical(2, grad_reduce), hierarchical(2, grad_reduce), at=2)

    def apart() -> Method:
        one, other = (Quantized(parameters=quantizers.int8(block=8)) for _ in range(2))
        return switch(hierarchical(2, one), hierarchical(2, other), at=2)

    one, two = run(P * K, trained, P, shared), run(P * K, trained, P, apart)
    for mine, theirs in zip(one, two, strict=True):
        assert all(torch.equal(w, v) for w, v in zip(mine, theirs, strict=True))


@pytest.mark.ranks(4)
def test_positions_keep_one_model_while_weights_of_push_sum_differ(run) -> None:
    """A group's w_i is ½ in the second step of osgp, and x_i = w_i·z_i is known for the own shard alone."""
    found = run(4, trained, 2, lambda: osgp(1, grad_reduce=Quantized(parameters=quantizers.int8(block=8))))
    plain = run(4, trained, 2, lambda: osgp(1))
    for group in (found[:2], found[2:]):
        assert all(torch.equal(w, v) for w, v in zip(*group, strict=True))
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine[-1], theirs[-1], rtol=0, atol=0.05)


@pytest.mark.ranks(2)
def test_each_step_rounds_by_its_own_number(run) -> None:
    """The number of a step is part of the seed, and a checkpoint keeps it. There are several buckets."""

    def one(world: Communicator) -> list[int]:
        net = model(dtype=torch.float32)
        inner, method = momentum(list(net.parameters())), bsp(Quantized(DICE))
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world), method, bucket_cap_mb=1e-4)
        assert len(optimizer.buckets) > 1
        numbers = []
        for t in range(3):
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank, torch.float32)).backward()
            optimizer.step()
            numbers.append(method.state_dict()["grad_reduce"].replicated["t"])
        return numbers

    assert run(2, one) == [[1, 2, 3]] * 2


def test_a_state_is_of_its_time() -> None:
    """Later training does not change a state that was taken."""

    def one(world: Communicator) -> None:
        net, topology = model(dtype=torch.float32), form(world, 2)
        method = hierarchical(1, Quantized(quantizers.int8(), quantizers.int8()), quantize=quantizers.int8())
        optimizer = hpcsgd.DistributedOptimizer(momentum(list(net.parameters())), net, topology, method)

        def step(t: int) -> None:
            optimizer.zero_grad()
            loss(net, *batch(t, world.rank, torch.float32)).backward()
            optimizer.step()

        for t in range(3):
            step(t)
        state = optimizer.method.state_dict()
        before = copy.deepcopy(state)
        step(3)
        kept, leaves = (tree_leaves([s.to_dict() for s in states.values()]) for states in (before, state))
        assert any(isinstance(x, Tensor) for x in leaves)
        assert all(torch.equal(x, y) for x, y in zip(kept, leaves, strict=True) if isinstance(x, Tensor))

    threads.run(4, one)
