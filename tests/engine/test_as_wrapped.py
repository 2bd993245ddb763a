"""What would be trained by nobody, or by one rank alone, is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from hpcsgd import DistributedOptimizer, JobError, UserError, bsp, hierarchical
from hpcsgd.core.topology import form
from hpcsgd.transport import Transport
from references import model as make_model
from references import one_step, vector

Change = Callable[[nn.Module, optim.Optimizer], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "another dtype": (lambda net, _: net.float(), "parameter 3.bias was moved after"),
    "another place": (
        lambda net, _: setattr(net[0].weight, "data", torch.ones(7, 5).double()),
        "0.weight was moved",
    ),
    "unfrozen": (lambda net, _: net[2].requires_grad_(True), "frozen when .* requires a gradient now"),
    "a group added to the inner optimizer": (
        lambda _, inner: inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        "add_param_group after",
    ),
    "a step of the inner optimizer": (lambda _, inner: inner.step(), "step.. of the wrapped optimizer"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1)])
def test_changes_after_the_wrapping_are_refused(run, P: int, K: int, change: str) -> None:
    apply, message = CHANGES[change]

    def train(world: Transport) -> None:
        job, net = form(world, groups=P), make_model()
        net[2].requires_grad_(False)
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, job, hierarchical(2))
        one_step(net, optimizer, job, 0)
        with pytest.raises(UserError, match=message):
            apply(net, inner)
            optimizer.step()

    run(P * K, train)


@pytest.mark.parametrize("n", [1, 2])
def test_what_cannot_be_wrapped(run, n: int) -> None:
    def refusals(world: Transport) -> list[str]:
        job = form(world)

        def message(net: nn.Module, optimizer: optim.Optimizer | None = None) -> str:
            with pytest.raises(UserError) as error:
                DistributedOptimizer(optimizer or optim.SGD(net.parameters(), 0.1), net, job, bsp())
            return str(error.value)

        net = make_model()
        inner = optim.SGD(net.parameters(), 0.1)
        DistributedOptimizer(inner, net, job, bsp())
        with_complex = nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
        return [message(net, inner), message(nn.LazyLinear(2)), message(with_complex)]

    for again, lazy, of_complex in run(n, refusals):
        assert again.startswith("the optimizer is a DistributedOptimizer already")
        assert lazy.startswith("parameters of the model have no shape yet")
        assert of_complex.startswith("parameter 0 is of torch.complex64")


def frozen(rank: int) -> nn.Module:
    net = make_model()
    net.append(nn.Linear(3, 3 + rank % 2).requires_grad_(False))
    return net


def buffered(rank: int) -> nn.Module:
    net = make_model()
    net.register_buffer("seen", torch.zeros(1 + rank % 2))
    return net


def transposed(rank: int) -> nn.Module:
    net = make_model()
    if rank % 2:
        net[0].weight.data = net[0].weight.data.t().contiguous().t()
    return net


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (frozen, "weight of shape (3, 3) and torch.float32 here, parameter 4.weight of shape (4, 3)"),
        (buffered, "buffer seen of shape (1,) and torch.float32 here, buffer seen of shape (2,)"),
        (transposed, "here, parameter 0.weight of shape (7, 5) and torch.float64 and strides (1, 7) there"),
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_whose_models_differ_elsewhere_than_in_what_is_trained(
    run, n: int, make: Callable[[int], nn.Module], told: str
) -> None:
    def wrap(world: Transport) -> str:
        net = make(world.rank)
        trained = [p for p in net.parameters() if p.requires_grad]
        with pytest.raises(JobError) as error:
            DistributedOptimizer(optim.SGD(trained, 0.1), net, form(world), bsp())
        return str(error.value)

    first = run(n, wrap)[0]
    assert first.startswith("ranks 0 and 1 differ: ")
    assert told in first


@pytest.mark.parametrize("n", [1, 2, 4])
def test_frozen_parameters_and_buffers_start_from_rank_0(run, n: int) -> None:
    def start(world: Transport) -> tuple[torch.Tensor, list[float]]:
        net = make_model(seed=world.rank)
        net[0].requires_grad_(False)
        net[2].weight.requires_grad_(False)
        net.register_buffer("flags", torch.tensor([world.rank == 0, True]))
        net.register_buffer("columns", torch.full((2, 3), float(world.rank)).t())
        trained = [p for p in net.parameters() if p.requires_grad]
        DistributedOptimizer(optim.SGD(trained, 0.1), net, form(world), bsp())
        return vector(net), [*net.flags.tolist(), *net.columns.flatten().tolist()]

    for found, buffers in run(n, start):
        assert torch.equal(found, vector(make_model()))
        assert buffers == [True, True, *[0.0] * 6]


@pytest.mark.parametrize("n", [2])
def test_models_compiled_down_to_aten_train_alike(run, n: int) -> None:
    def train(world: Transport) -> float:
        job, nets = form(world), [make_model(), make_model()]
        for net in nets:
            optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, job, bsp())
            if net is nets[1]:
                net.compile(backend="aot_eager")
            for t in range(3):
                one_step(net, optimizer, job, t)
        return (vector(nets[0]) - vector(nets[1])).abs().max().item()

    assert max(run(n, train)) < 1e-12
