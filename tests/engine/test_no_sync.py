"""Gradients add up on each rank inside `no_sync()`, and are averaged after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, Method, UserError
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import Topology, form
from references import batch, loss, vector
from references import model as make_model

SMALL = 1e-6
"""Megabytes per bucket, so few that every parameter has its own bucket."""
METHODS: dict[str, Callable[[], Method]] = {
    "hierarchical": lambda: hpcsgd.hierarchical(2),
    "bsp": hpcsgd.bsp,
    "selsync": lambda: hpcsgd.selsync(0.1),
    "sgp": hpcsgd.sgp,
    "error feedback": lambda: hpcsgd.bsp(grad_reduce=hpcsgd.Sparse(hpcsgd.TopK(0.25))),
}


def wrapped(net: nn.Module, topology: Topology, method: Method, **options: Any) -> DistributedOptimizer:
    inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return DistributedOptimizer(inner, net, topology, method, bucket_cap_mb=SMALL, **options)


def backward(net: nn.Module, t: int, rank: int) -> None:
    dtype = next(net.parameters()).dtype
    loss(net, *batch(t, rank, dtype)).backward()


def accumulate(net: nn.Module, optimizer: DistributedOptimizer, t: int, rank: int, passes: int) -> None:
    """Make `passes` backward passes of one step, all but the last inside the block, as with DDP."""
    optimizer.zero_grad()
    for number in range(passes):
        last = number == passes - 1
        with contextlib.nullcontext() if last else optimizer.no_sync():
            backward(net, 10 * t + number, rank)


@pytest.mark.threads(unless={"method": {"hierarchical", "bsp"}, "overlap": True})
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("P", "K"), [(1, 2), (1, 3), (2, 1), (2, 2)])
def test_bits_are_those_of_gradient_accumulation_steps(
    run, P: int, K: int, method: str, overlap: bool, dtype: torch.dtype
) -> None:
    def body(world: Communicator) -> None:
        topology, found = form(world, P), []
        for steps in (3, 1):
            net = make_model(dtype=dtype)
            optimizer = wrapped(
                net, topology, METHODS[method](),
                gradient_accumulation_steps=steps, overlap_grad_reduce=overlap,
            )  # fmt: skip
            for t in range(4):
                if steps == 1:
                    accumulate(net, optimizer, t, world.rank, 3)
                else:
                    optimizer.zero_grad()
                    for number in range(3):
                        backward(net, 10 * t + number, world.rank)
                optimizer.step(loss=1.0)
            metrics = {k: v for k, v in optimizer.metrics.items() if not k.endswith("_seconds")}
            found.append((vector(net), metrics))
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]

    run(P * K, body)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("last_outside", [True, False])
def test_any_number_of_passes_on_each_rank(run, n: int, overlap: bool, last_outside: bool) -> None:
    """Training is as in plain torch with the sum of each rank's losses, also if no pass follows the block."""

    def passes(t: int, rank: int) -> int:
        return 1 + (t + rank) % 3

    def train(world: Communicator) -> Tensor:
        net = make_model()
        optimizer = wrapped(net, form(world), hpcsgd.bsp(), overlap_grad_reduce=overlap)
        for t in range(4):
            if last_outside:
                accumulate(net, optimizer, t, world.rank, passes(t, world.rank))
            else:
                optimizer.zero_grad()
                with optimizer.no_sync():
                    for number in range(passes(t, world.rank)):
                        backward(net, 10 * t + number, world.rank)
            optimizer.step()
        return vector(net)

    expected = make_model()
    plain = optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for t in range(4):
        plain.zero_grad()
        for rank in range(n):
            for number in range(passes(t, rank)):
                (loss(expected, *batch(10 * t + number, rank)) / n).backward()
        plain.step()
    for found in run(n, train):
        torch.testing.assert_close(found, vector(expected), rtol=0, atol=1e-12)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make_model(seed=1), make_model(seed=2), make_model(seed=3)])
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.used](x)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("last_outside", [True, False])
@pytest.mark.ranks(2)
def test_parameters_that_only_passes_inside_have_used(run, overlap: bool, last_outside: bool) -> None:
    """Parameters that only passes inside the block use are updated; unused parameters are not."""

    def train(world: Communicator) -> tuple[Tensor, list[bool]]:
        net = TwoLayers()
        optimizer = wrapped(net, form(world), hpcsgd.bsp(), overlap_grad_reduce=overlap)
        before = [vector(layer) for layer in net.layers]
        for t in range(3):
            optimizer.zero_grad()
            net.used = 0
            with optimizer.no_sync():
                backward(net, t, world.rank)
            if last_outside:
                net.used = 1
                backward(net, t, world.rank)
            optimizer.clip_grad_norm_(100.0)
            optimizer.step()
        moved = [not torch.equal(x, vector(layer)) for x, layer in zip(before, net.layers, strict=True)]
        return vector(net), moved

    expected = TwoLayers()
    plain = optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for t in range(3):
        plain.zero_grad()
        for expected.used in range(1 + last_outside):
            for rank in range(2):
                (loss(expected, *batch(t, rank)) / 2).backward()
        plain.step()
    for found, moved in run(2, train):
        torch.testing.assert_close(found, vector(expected), rtol=0, atol=1e-12)
        assert moved == [True, last_outside, False]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.ranks(2)
def test_gradients_are_the_ranks_own_inside_and_averaged_outside(run, overlap: bool) -> None:
    """One rank may look at its gradients inside the block while the others do not."""

    def gradients(net: nn.Module) -> Tensor:
        return torch.cat(
            [p.grad.detach().reshape(-1).clone() for p in net.parameters() if p.grad is not None]
        )

    def body(world: Communicator) -> None:
        plain = [make_model() for _ in range(2)]
        for rank, net in enumerate(plain):
            backward(net, 0, rank)
        own, mean = gradients(plain[world.rank]), torch.stack([*map(gradients, plain)]).mean(0)
        net = make_model()
        optimizer = wrapped(net, form(world), hpcsgd.bsp(), overlap_grad_reduce=overlap)
        with optimizer.no_sync():
            backward(net, 0, world.rank)
            if world.rank == 0:
                torch.testing.assert_close(gradients(net), own, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradients(net), mean, rtol=0, atol=1e-12)
        total = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        torch.testing.assert_close(total, mean.norm(), rtol=1e-12, atol=0)
        optimizer.step()
        expected = vector(make_model()) - 0.1 * mean * 0.1 / (mean.norm() + 1e-6)
        torch.testing.assert_close(vector(net), expected, rtol=0, atol=1e-10)

    run(2, body)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_only_another_rank_has(run, overlap: bool) -> None:
    """Inside the block the gradients are None, as with DDP. After it, a script's own clipping finds them."""

    def body(world: Communicator) -> None:
        net = TwoLayers()
        optimizer = wrapped(net, form(world), hpcsgd.bsp(), overlap_grad_reduce=overlap)
        with optimizer.no_sync():
            net.used = world.rank
            backward(net, 0, world.rank)
            assert all(p.grad is None for p in net.layers[1 - world.rank].parameters())
        expected = TwoLayers()
        for rank in range(2):
            expected.used = rank
            (loss(expected, *batch(0, rank)) / 2).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (net, expected)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-12, atol=0)
        optimizer.step()
        optim.SGD(expected.parameters(), lr=0.1).step()
        torch.testing.assert_close(vector(net), vector(expected), rtol=0, atol=1e-12)

    run(2, body)


CALLS: dict[str, Callable[[DistributedOptimizer], Any]] = {
    "step()": lambda optimizer: optimizer.step(),
    "step(closure)": lambda optimizer: optimizer.step(lambda: 1.0),
    "clip_grad_norm_()": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "synchronize()": lambda optimizer: optimizer.synchronize(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 1), (2, 2)])
def test_inside_the_block_it_is_refused(run, P: int, K: int, call: str, overlap: bool, first: bool) -> None:
    """All ranks refuse the call before an update. The optimizer continues if the script catches the error."""

    def body(world: Communicator) -> None:
        net = make_model()
        optimizer = wrapped(net, form(world, P), hpcsgd.hierarchical(2), overlap_grad_reduce=overlap)
        if not first:
            backward(net, 0, world.rank)
            optimizer.step()
            optimizer.zero_grad()
        before, t = vector(net), optimizer.t
        with optimizer.no_sync():
            backward(net, 1, world.rank)
            name = call.partition("(")[0]
            with pytest.raises(UserError, match=rf"^{name}\(\) in no_sync\(\): .* end the block before"):
                CALLS[call](optimizer)
        assert torch.equal(vector(net), before)
        assert optimizer.t == t
        optimizer.zero_grad()
        accumulate(net, optimizer, 2, world.rank, 2)
        optimizer.step()
        assert optimizer.t == t + 1

    run(P * K, body)


@pytest.mark.ranks(2)
@pytest.mark.threads
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_a_call_inside_on_one_rank_alone(run, call: str, overlap: bool, inside: int, first: bool) -> None:
    """All ranks of the group get one line that names the block, and no rank makes an update."""
    lines: dict[int, str] = {}

    def body(world: Communicator) -> None:
        net = make_model()
        optimizer = wrapped(net, form(world), hpcsgd.hierarchical(2), overlap_grad_reduce=overlap)
        if not first:
            backward(net, 0, world.rank)
            optimizer.step()
            optimizer.zero_grad()
        before = vector(net)
        try:
            with optimizer.no_sync() if world.rank == inside else contextlib.nullcontext():
                backward(net, 1, world.rank)
                CALLS[call](optimizer)
        except UserError as error:
            assert torch.equal(vector(net), before)
            lines[world.rank] = str(error)
            world.barrier()
            raise  # this also ends the reduction that one rank alone began

    with pytest.raises(UserError, match=r"in no_sync"):
        run(2, body)
    name = call.partition("(")[0]
    assert len(lines) == 2
    assert all(f"rank {inside} is in {name}() in no_sync" in line for line in lines.values())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.ranks(2)
def test_nested_blocks_and_exceptions(run, overlap: bool) -> None:
    def train(world: Communicator, way: str) -> Tensor:
        net = make_model()
        optimizer = wrapped(net, form(world), hpcsgd.bsp(), overlap_grad_reduce=overlap)
        for t in range(2):
            optimizer.zero_grad()
            if way == "nested":
                with optimizer.no_sync():
                    with optimizer.no_sync():
                        backward(net, t, world.rank)
                    backward(net, t + 1, world.rank)
            elif way == "exception":
                with pytest.raises(KeyError), optimizer.no_sync():
                    backward(net, t, world.rank)
                    backward(net, t + 1, world.rank)
                    raise KeyError
            elif way == "emptied":
                with optimizer.no_sync():
                    backward(net, 7, world.rank)
                    optimizer.zero_grad()
                    backward(net, t, world.rank)
                    backward(net, t + 1, world.rank)
            elif way == "thrown away":
                with optimizer.no_sync():
                    backward(net, 7, world.rank)
                optimizer.zero_grad()
                accumulate(net, optimizer, 0, world.rank, 0)
                with optimizer.no_sync():
                    backward(net, t, world.rank)
                    backward(net, t + 1, world.rank)
            else:
                accumulate(net, optimizer, 0, world.rank, 0)
                with optimizer.no_sync():
                    backward(net, t, world.rank)
                with optimizer.no_sync():
                    backward(net, t + 1, world.rank)
            backward(net, t + 2, world.rank)
            with optimizer.no_sync():
                pass
            optimizer.step()
        return vector(net)

    def body(world: Communicator) -> None:
        expected = train(world, "plain")
        for way in ("nested", "exception", "emptied", "thrown away"):
            assert torch.equal(train(world, way), expected), way

    run(2, body)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.ranks(2)
def test_with_gradient_accumulation_steps(run, overlap: bool) -> None:
    """Passes inside `no_sync()` do not count. Gradients are sent after the set number of other passes."""

    def body(world: Communicator) -> None:
        found = []
        for steps in (1, 2):
            net = make_model()
            optimizer = wrapped(
                net, form(world), hpcsgd.bsp(),
                gradient_accumulation_steps=steps, overlap_grad_reduce=overlap,
            )  # fmt: skip
            for t in range(3):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    backward(net, t, world.rank)
                with optimizer.no_sync() if steps == 1 else contextlib.nullcontext():
                    backward(net, t + 1, world.rank)
                backward(net, t + 2, world.rank)
                optimizer.step()
            found.append(vector(net))
        assert torch.equal(*found)

    run(2, body)


@pytest.mark.ranks(2)
def test_a_pass_inside_after_the_gradients_were_sent_is_refused(run) -> None:
    def body(world: Communicator) -> None:
        net = make_model()
        optimizer = wrapped(net, form(world), hpcsgd.bsp())
        backward(net, 0, world.rank)
        with optimizer.no_sync(), pytest.raises(UserError, match=r"changed after it was sent: .*no_sync"):
            backward(net, 1, world.rank)

    run(2, body)


@pytest.mark.threads
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 1)])
def test_no_checkpoint_loses_what_passes_inside_have_computed(
    run, tmp_path: Path, P: int, K: int, overlap: bool
) -> None:
    def body(world: Communicator) -> None:
        net = make_model()
        optimizer = wrapped(net, form(world, P), hpcsgd.hierarchical(2), overlap_grad_reduce=overlap)
        for inside in (True, False):
            with optimizer.no_sync():
                backward(net, 0, world.rank)
                if inside:
                    with pytest.raises(UserError, match=r"save\(\) after backward passes inside no_sync\(\)"):
                        hpcsgd.save(tmp_path, optimizer)
            with pytest.raises(UserError, match=r"save\(\) after backward passes inside no_sync\(\)"):
                hpcsgd.save(tmp_path, optimizer)
            optimizer.zero_grad()
        accumulate(net, optimizer, 0, world.rank, 2)
        optimizer.step()
        hpcsgd.save(tmp_path, optimizer)

    run(P * K, body)
