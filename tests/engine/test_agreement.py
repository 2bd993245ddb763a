"""If ranks make different calls, all get one line that names the calls before a wrong update is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.methods.selsync import gradients
from hpcsgd.parts.averagers import Mean
from references import batch, loss, vector
from references import model as make_model

PATIENCE = 20.0


def made(world: Communicator, P: int, method: Callable[[], Any], lr: float = 0.1) -> tuple[nn.Module, Any]:
    net = make_model()
    inner = optim.SGD(net.parameters(), lr=lr)
    return net, DistributedOptimizer(inner, net, form(world, P), method())


def train(world: Communicator, net: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for t in range(first, last):
        optimizer.zero_grad()
        loss(net, *batch(t, world.rank)).backward()
        optimizer.step()


def norms(net: nn.Module, optimizer: Any) -> None:
    for param in net.parameters():
        assert param.grad is None or param.grad.norm() >= 0


ALONE: dict[str, Callable[[nn.Module, Any], object]] = {
    "clip_grad_norm_()": lambda net, optimizer: optimizer.clip_grad_norm_(1.0),
    "synchronize()": lambda net, optimizer: optimizer.synchronize(),
    "a use of param.grad": norms,
    "state_dict()": lambda net, optimizer: optimizer.state_dict(),
    "gather_parameters()": lambda net, optimizer: optimizer.gather_parameters(),
    "zero_grad()": lambda net, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("call", ALONE)
@pytest.mark.parametrize("K", [3, 2])
def test_a_call_on_one_rank_alone_between_backward_and_step(K: int, call: str) -> None:
    """The other ranks are in `step()`.

    Both calls are the first after the gradients were sent, and every rank reports the difference.
    """
    named = call.replace("()", r"\(\)")
    line = rf"rank 0 is in step\(\) after 2 updates, but rank {K - 1} is in {named} after 2 updates"

    def body(world: Communicator) -> None:
        net, optimizer = made(world, 1, lambda: hpcsgd.hierarchical(2))
        train(world, net, optimizer, 0, 2)
        optimizer.zero_grad()
        loss(net, *batch(2, world.rank)).backward()
        with pytest.raises(UserError, match=line):
            ALONE[call](net, optimizer) if world.rank == K - 1 else optimizer.step()

    threads.run(K, body, timeout=PATIENCE)


METHODS = {
    "hierarchical": lambda: hpcsgd.hierarchical(2),
    "allreduce": lambda: hpcsgd.allreduce_local_sgd(2),
    "diloco": lambda: hpcsgd.diloco(2),
    "int8": lambda: hpcsgd.hierarchical(2, quantize=hpcsgd.quantizers.int8()),
    "sasgd": lambda: hpcsgd.sasgd(2),
    "sparseloco": lambda: hpcsgd.sparseloco(2, density=0.5),
    "des_loc": lambda: hpcsgd.des_loc(2),
    "delayed": lambda: hpcsgd.delayed(hpcsgd.hierarchical(2), sync_delay=1),
    "streaming": lambda: hpcsgd.streaming(hpcsgd.diloco(2), num_fragments=2, sync_delay=1),
    "post_local": lambda: hpcsgd.post_local(2),
    "fedavg": lambda: hpcsgd.fedavg(per_epoch=1, steps_per_epoch=2),
    "selsync": lambda: hpcsgd.selsync(0.0, aggregate=gradients),
    "bsp": hpcsgd.bsp,
}


@pytest.mark.parametrize("method", METHODS)
def test_groups_that_are_unlike_steps_ahead_do_not_average(method: str) -> None:
    """Group g starts at step 2g, so the groups would synchronize after different numbers of updates."""

    def body(world: Communicator) -> None:
        net, optimizer = made(world, 3, METHODS[method])
        optimizer.resume_from(world.rank * 2, [{} for _ in optimizer.param_groups], None)
        train(world, net, optimizer, 0, 6)

    with pytest.raises(
        UserError, match=r"rank 0 is in .* after \d+ updates?, but rank 1 is in .* after \d+ updates?"
    ):
        threads.run(3, body, timeout=PATIENCE)


def test_updates_before_a_synchronization_are_reported() -> None:
    def body(world: Communicator) -> None:
        net, optimizer = made(world, 2, lambda: hpcsgd.hierarchical(2))
        train(world, net, optimizer, 0, 1)
        optimizer.resume_from(1 + world.rank * 2, [{} for _ in optimizer.param_groups], None)
        train(world, net, optimizer, 1, 2)

    line = "rank 0 is in a synchronization after 1 update, but rank 1 is in a synchronization after 3 updates"
    with pytest.raises(UserError, match=line):
        threads.run(2, body, timeout=PATIENCE)


def test_nobody_gets_a_bucket_before_the_agreement() -> None:
    """No bucket is averaged before ranks agree, although there are more buckets than are sent at once."""

    def body(world: Communicator) -> None:
        net = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(
            inner, net, form(world, 2), hpcsgd.hierarchical(2), bucket_cap_mb=1e-6
        )
        step = replace(optimizer._step, t=world.rank)
        with pytest.raises(UserError, match="a synchronization"):
            next(Mean().average(step.shards, step))

    threads.run(2, body, timeout=PATIENCE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("P", "K"), [(3, 1), (1, 2)])
def test_learning_rates_that_come_to_differ(method: str, P: int, K: int) -> None:
    if P == 1 and method == "sasgd":
        pytest.skip("there is no group to synchronize with")

    def body(world: Communicator) -> None:
        net, optimizer = made(world, P, METHODS[method])
        train(world, net, optimizer, 0, 2)
        optimizer.param_groups[0]["lr"] = 0.1 if world.rank == 0 else 0.2
        train(world, net, optimizer, 2, 6)

    with pytest.raises(UserError, match=r"the learning rate is 0.1 on rank 0 and 0.2 on rank 1 in step \d"):
        threads.run(P * K, body, timeout=PATIENCE)


def test_a_rank_that_leaves_a_step_out_on_its_own() -> None:
    """One rank discards gradients that the other one uses."""

    def body(world: Communicator) -> None:
        net, optimizer = made(world, 1, hpcsgd.bsp)
        for t in range(3):
            loss(net, *batch(t, world.rank)).backward()
            if t == 1 and world.rank == 1:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(
        UserError, match=r"rank 0 is in step\(\) after 1 update, but rank 1 is in zero_grad\(\)"
    ):
        threads.run(2, body, timeout=PATIENCE)


class Pair(nn.Module):
    def __init__(self, seed: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("hidden", [4, 40], ids=["same sizes", "other sizes"])
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.ranks(2)
def test_two_optimizers_whose_gradients_come_in_another_order_on_another_rank(
    run, P: int, hidden: int
) -> None:
    def losses(nets: list[Pair], t: int, rank: int) -> Tensor:
        x, y = batch(t, rank)
        order = reversed(nets) if rank % 2 else nets
        return torch.stack([loss(net, x, y) for net in order]).sum()

    def body(world: Communicator) -> Tensor:
        topology, nets = form(world, P), [Pair(1, 4), Pair(2, hidden)]
        optimizers = [
            DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, hpcsgd.bsp())
            for net in nets
        ]
        for t in range(3):
            losses(nets, t, world.rank).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([vector(net) for net in nets])

    nets = [Pair(1, 4), Pair(2, hidden)]
    plain = optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    for t in range(3):
        plain.zero_grad()
        (losses(nets, t, 0) + losses(nets, t, 1)).div(2).backward()
        plain.step()
    expected = torch.cat([vector(net) for net in nets])
    for w in run(2, body):
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-12)


def test_nothing_is_updated_before_ranks_agree() -> None:
    """Buckets that arrive early are not updated either.

    If the error is caught, the model is that of the step before.
    """

    def body(world: Communicator) -> bool:
        net = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, form(world, 1), hpcsgd.bsp(), bucket_cap_mb=1e-5)
        train(world, net, optimizer, 0, 1)
        inner.param_groups[0]["lr"] *= 1 + world.rank
        before = vector(net)
        with pytest.raises(UserError, match="learning rate"):
            train(world, net, optimizer, 1, 2)
        return torch.equal(vector(net), before)

    assert all(threads.run(2, body, timeout=PATIENCE))
