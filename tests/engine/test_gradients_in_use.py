"""Gradients used as in other projects' training loops equal those of one process on the batch of all ranks.

Each loop is written once. It runs in plain torch, and on ranks with methods that average the gradients of a
group or of all groups. The methods cover every kind of result that a gradient reduction leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError, bsp
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.parts.grad_reduces import AllReduce
from references import batch, loss, vector
from references import model as make_model

STEPS = 4
Backward = Callable[[nn.Module, int], None]
"""The backward pass of a step, on the batch of one rank or as the mean of all."""
Loop = Callable[[nn.Module, optim.Optimizer, Backward], object]


def ordinary(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    between(lambda net: None)(net, optimizer, backward)


def between(change: Callable[[nn.Module], object]) -> Loop:
    """Return the loop that changes gradients between `backward()` and `step()`.

    The loop returns the results of `change`.
    """

    def loop(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> list[object]:
        seen = []
        for t in range(STEPS):
            optimizer.zero_grad()
            backward(net, t)
            seen.append(change(net))
            optimizer.step()
        return seen

    return loop


def each(change: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], None]:
    def of_all(net: nn.Module) -> None:
        for param in net.parameters():
            change(param)

    return of_all


def replace(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.clamp(-0.05, 0.05)


def keep(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad * 1.0


def cancel(net: Any) -> None:
    net[3].weight.grad = None


def swap(net: Any) -> None:
    net[0].bias.grad, net[2].bias.grad = net[2].bias.grad.clone(), net[0].bias.grad.clone()


def joined(net: nn.Module) -> None:
    """Change all gradients as one vector, as PCGrad and other gradient surgery do."""
    params = list(net.parameters())
    flat = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
    for param, part in zip(
        params, (flat - flat.mean()).split([param.numel() for param in params]), strict=True
    ):
        param.grad = part.view_as(param)


def noise(net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for param in net.parameters():
        assert param.grad is not None
        param.grad += torch.randn(param.shape, generator=generator, dtype=param.dtype, device="cpu")


def norms(net: nn.Module) -> list[float]:
    return [param.grad.norm().item() for param in net.parameters() if param.grad is not None]


def in_numpy(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.numpy()[...] *= 0.5


def through_data(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data.clamp_(-0.05, 0.05)


def given_memory(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data.clamp(-0.05, 0.05)


def from_a_vector(net: nn.Module) -> None:
    """Change gradients through one vector, as federated and multi-task code does."""
    grads = [param.grad for param in net.parameters() if param.grad is not None]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(grads).sin(), grads)


def all_at_once(net: nn.Module) -> None:
    vars(torch)["_foreach_mul_"]([param.grad for param in net.parameters()], 0.5)


CHANGES: dict[str, Callable[[Any], object]] = {
    "none": lambda net: None,
    "clip by norm": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1).item(),
    "clip by value": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.05),
    "replaced": each(replace),
    "replaced by the same": each(keep),
    "cancelled": cancel,
    "read and cancelled": lambda net: (norms(net), cancel(net)),
    "swapped": swap,
    "noise": noise,
    "read": norms,
    "numpy": each(in_numpy),
    "data": each(through_data),
    "other memory": each(given_memory),
    "from a vector": from_a_vector,
    "in place": each(lambda param: param.grad.mul_(0.5)),  # type: ignore[union-attr]
    "foreach": all_at_once,
    "detached": each(lambda param: param.grad.detach().mul_(0.5)),  # type: ignore[union-attr]
    "flattened": joined,
    "in a tuple": lambda net: torch.stack((net[0].bias.grad, net[2].bias.grad)).norm().item(),
    "by name": lambda net: torch.linalg.vector_norm(x=net[3].weight.grad).item(),
}
READING = ("read", "read_afterwards", "clip by norm", "in a tuple", "by name")


def read_afterwards(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> list[object]:
    seen = []
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(net, t)
        optimizer.step()
        seen.append(norms(net))
    return seen


def given_memory_once(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    """Call `given_memory` at different places of a step."""
    change = each(given_memory)
    for t in range(2 * STEPS):
        optimizer.zero_grad(set_to_none=t % 2 == 0)
        backward(net, t)
        change(net) if t == 0 else None
        optimizer.step()
        change(net) if t in (2, 5) else None


def kept(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    """Keep the gradients of each task without copies, as gradient surgery does."""
    tasks = []
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(net, t)
        norms(net)
        tasks.append([param.grad for param in net.parameters()])
    for param, grads in zip(net.parameters(), zip(*tasks, strict=True), strict=True):
        param.grad = torch.stack([k * grad for k, grad in enumerate(grads) if grad is not None]).sum(0)
    optimizer.step()


def zeroed_by_the_model(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    for t in range(STEPS):
        net.zero_grad()
        backward(net, t)
        optimizer.step()


def filled_with_zeros(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    for t in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        backward(net, t)
        optimizer.step()


def filled_with_zeros_by_the_model(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    for t in range(STEPS):
        net.zero_grad(set_to_none=False)
        backward(net, t)
        optimizer.step()


def thrown_away(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    """Drop gradients, as a discriminator's after the generator's turn, or in a step that all ranks skip."""
    for t in range(STEPS):
        backward(net, t + 100)
        optimizer.zero_grad()
        backward(net, t)
        optimizer.step()
        optimizer.zero_grad()


def thrown_away_by_the_model(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    for t in range(STEPS):
        backward(net, t + 100)
        net.zero_grad()
        backward(net, t)
        optimizer.step()
        net.zero_grad()


def read_and_thrown_away(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    for t in range(STEPS):
        backward(net, t + 100)
        norms(net)
        net.zero_grad()
        backward(net, t)
        optimizer.step()
        optimizer.zero_grad()


def added_to_and_thrown_away(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    """Add gradients to those of the last step and drop them.

    In the textbook's loop, a discriminator gets gradients of the generator's turn in this way.
    """
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(net, t)
        optimizer.step()
        backward(net, t + 100)


def by_hand(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    """Set gradients that no backward pass has put into the parameters."""
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(net, t)
        gradients = [param.grad.clone() for param in net.parameters() if param.grad is not None]
        optimizer.zero_grad()
        for param, gradient in zip(net.parameters(), gradients, strict=True):
            param.grad = gradient
        optimizer.step()


def twice(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(net, t)
        optimizer.step()
        optimizer.step()


def without_gradients(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(net, t)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


def read_and_added_to(net: nn.Module, optimizer: optim.Optimizer, backward: Backward) -> None:
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(net, t)
        norms(net)
        backward(net, t + 100)
        optimizer.step()


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        read_afterwards, given_memory_once, kept, zeroed_by_the_model,
        filled_with_zeros, filled_with_zeros_by_the_model, thrown_away,
        thrown_away_by_the_model, read_and_thrown_away,
        added_to_and_thrown_away, by_hand, twice, without_gradients, read_and_added_to,
    )
} | {name: between(change) for name, change in CHANGES.items()}  # fmt: skip

MAKE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "muon": lambda params: Unknown(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}


class Unknown(optim.SGD):
    """An optimizer that might look at whole tensors."""


def plain(N: int, loop: Loop, make: Callable[[Any], optim.Optimizer]) -> tuple[Tensor, object]:
    def backward(net: nn.Module, t: int) -> None:
        torch.stack([loss(net, *batch(t, rank)) for rank in range(N)]).mean().backward()

    net = make_model()
    seen = loop(net, make(net.parameters()), backward)
    return vector(net), seen


def trained(
    world: Communicator, P: int, loop: Loop, make: Callable[[Any], optim.Optimizer], **options: Any
) -> tuple[Tensor, object]:
    def backward(net: nn.Module, t: int) -> None:
        loss(net, *batch(t, world.rank)).backward()

    net = make_model()
    optimizer = DistributedOptimizer(make(net.parameters()), net, form(world, P), **options)
    seen = loop(net, optimizer, backward)
    return vector(net), seen


SHAPES = [(2, 3), (1, 1), (1, 2), (2, 1), (1, 4), (2, 2)]


@pytest.mark.parametrize(
    ("P", "K", "kind"), [*((P, K, "momentum") for P, K in SHAPES), (2, 3, "adamw"), (2, 3, "muon")]
)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("method", [bsp, lambda: bsp(AllReduce())], ids=["shards", "whole"])
@pytest.mark.parametrize("name", LOOPS)
def test_the_numbers_are_those_of_one_process(
    run, P: int, K: int, name: str, method: Callable, overlap: bool, kind: str
) -> None:
    """Buckets are small, so that some have been sent and some have not."""
    expected, seen = plain(P * K, LOOPS[name], MAKE[kind])
    options = {"method": method(), "overlap_grad_reduce": overlap, "bucket_cap_mb": 1e-4}

    def train(world: Communicator) -> tuple[Tensor, object]:
        return trained(world, P, LOOPS[name], MAKE[kind], **options | {"method": method()})

    for w, theirs in run(P * K, train):
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-11)
        if name in READING:
            torch.testing.assert_close(torch.tensor(theirs), torch.tensor(seen), rtol=1e-5, atol=0)


@pytest.mark.ranks(2)
def test_gradients_are_clipped_where_they_are_read(run) -> None:
    """Clipping scales the gradients that this rank updates by; the others are scaled at their first use."""

    def train(world: Communicator) -> list[float]:
        net = make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward()
        norms(net)
        optimizer.clip_grad_norm_(0.1)
        return norms(net)

    net = make_model()
    torch.stack([loss(net, *batch(0, rank)) for rank in range(2)]).mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    for found in run(2, train):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(norms(net)), rtol=1e-5, atol=0)


@pytest.mark.ranks(2)
def test_gradients_by_hand_in_place_of_averaged_ones_are_averaged(run) -> None:
    def train(world: Communicator) -> Tensor:
        net = make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=1.0), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward()
        norms(net)
        optimizer.zero_grad()
        for param in net.parameters():
            param.grad = torch.full_like(param, world.rank)
        optimizer.step()
        return vector(net)

    for w in run(2, train):
        assert torch.equal(w, vector(make_model()) - 0.5)


@pytest.mark.ranks(2)
def test_gradients_are_made_whole_once(run) -> None:
    def train(world: Communicator) -> list[int]:
        net = make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward()
        sent = []
        for _ in range(2):
            optimizer.synchronize()
            sent.append(world.stats.totals()["grad_reduce"].bytes)
        return sent

    for once, twice in run(2, train):
        assert once == twice > 0


USES: dict[str, Callable[[Any, Any], object]] = {
    "step": lambda net, optimizer: optimizer.step(),
    "clip": lambda net, optimizer: optimizer.clip_grad_norm_(1.0),
    "synchronize": lambda net, optimizer: optimizer.synchronize(),
    "read": lambda net, optimizer: norms(net),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_were_added_to_those_of_an_earlier_step(use: str, overlap: bool) -> None:
    """This is an error, because each rank has kept only its own part of the earlier gradients."""

    def body(world: Communicator) -> None:
        net = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, form(world), bsp(), overlap_grad_reduce=overlap)
        for t in range(2):
            loss(net, *batch(t, world.rank)).backward()
            if t:
                USES[use](net, optimizer)
            optimizer.step()

    with pytest.raises(UserError, match=r"gradient of \S+ was added to that of an earlier step"):
        threads.run(2, body, timeout=20)


def test_gradients_of_an_earlier_step_that_this_one_adds_nothing_to() -> None:
    def body(world: Communicator) -> None:
        net: Any = make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), bsp())
        for t in range(2):
            x, y = batch(t, world.rank)
            hidden = net[:3](x)
            net[3].zero_grad()
            nn.functional.cross_entropy(net[3](hidden.detach() if t else hidden), y).backward()
            optimizer.step()

    with pytest.raises(UserError, match=r"gradient of [02].\w+ was added to that of an earlier step"):
        threads.run(2, body, timeout=20)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_error_feedback_cannot_take_gradients_back(set_to_none: bool) -> None:
    def body(world: Communicator) -> None:
        net = make_model()
        method = bsp(hpcsgd.Sparse(hpcsgd.TopK(density=0.5)))
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), method)
        loss(net, *batch(0, world.rank)).backward()
        optimizer.zero_grad(set_to_none)

    with pytest.raises(
        UserError,
        match=r"zero_grad\(\) after gradients were sent, of which this method's gradient reduction keeps",
    ):
        threads.run(2, body, timeout=20)


def test_a_hook_that_uses_gradients_in_the_backward_pass_is_refused() -> None:
    def body(world: Communicator) -> None:
        net: Any = make_model()
        DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), bsp())
        net[3].weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
        loss(net, *batch(0, world.rank)).backward()

    with pytest.raises(UserError, match=r"a gradient was used during backward\(\)"):
        threads.run(2, body, timeout=20)


def test_the_form_of_a_gradient_may_be_asked_for_at_any_time() -> None:
    """Asking for the shape, dtype and similar attributes sends nothing, so one rank alone may ask."""

    def body(world: Communicator) -> tuple[list[Any], bool]:
        net = make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward()
        found: list[Any] = []
        if world.rank:
            for param in net.parameters():
                g = param.grad
                assert g is not None
                found.append(
                    (
                        g.shape, g.dtype, g.device, g.layout, g.ndim, g.requires_grad, g.is_leaf, g.grad_fn,
                        g.is_sparse, g.numel(), g.size(), g.stride(), g.dim(), g.element_size(),
                        g.is_contiguous(), g.is_floating_point(), g.is_complex(), hash(g),
                    )
                )  # fmt: skip
        optimizer.step()
        return found, all(type(param.grad) is not Tensor for param in net.parameters())

    (_, here), (found, there) = threads.run(2, body, timeout=20)
    assert here
    assert there
    assert found[0][0] == (7, 5)
