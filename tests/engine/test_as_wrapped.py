"""A parameter that no rank would train, or only one rank, is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from hpcsgd import ChainedOptimizer, DistributedOptimizer, UserError, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from references import model as make_model
from references import one_step, vector

Change = Callable[[nn.Module, optim.Optimizer], object]


def assigned(net: nn.Module) -> None:
    net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)


def overwritten(net: nn.Module) -> None:
    """Replace parameters as `.to()` does if torch is set to overwrite them.

    The test does not use that setting, because it affects all threads.
    """
    for module in net.modules():
        for name, param in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(param.detach().clone(), param.requires_grad)


REPLACED = "was replaced in the model after DistributedOptimizer was made"
TAKEN_OUT = "was taken out of the model after DistributedOptimizer was made"
ADDED = "was added to the model after DistributedOptimizer was made"

CHANGES: dict[str, tuple[Change, str]] = {
    "another dtype": (lambda net, _: net.float(), "parameter 3.bias was moved after"),
    "shared memory": (lambda net, _: net.share_memory(), r"3.bias was moved .* give other processes a copy"),
    "another place": (
        lambda net, _: setattr(net[0].weight, "data", torch.ones(7, 5).double()),
        "0.weight was moved",
    ),
    "vector_to_parameters": (
        lambda net, _: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(net.parameters()).detach(), net.parameters()
        ),
        "parameter 3.bias was moved",
    ),
    "unfrozen": (lambda net, _: net[2].requires_grad_(True), "frozen when .* requires a gradient now"),
    "a group added to the inner optimizer": (
        lambda _, inner: inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        "add_param_group after",
    ),
    "assign=True": (lambda net, _: assigned(net), f"parameter 3.bias {REPLACED}"),
    "overwritten": (lambda net, _: overwritten(net), f"parameter 3.bias {REPLACED}"),
    "another layer": (
        lambda net, _: net.__setitem__(3, nn.Linear(7, 3).double()),
        f"parameter 3.bias {REPLACED}.*load_state_dict without assign=True",
    ),
    "another parameter": (
        lambda net, _: setattr(net[0], "weight", nn.Parameter(net[0].weight.detach().clone())),
        f"parameter 0.weight {REPLACED}",
    ),
    "one layer less": (lambda net, _: net.__delitem__(3), f"parameter 3.bias {TAKEN_OUT}"),
    "weight norm": (
        lambda net, _: nn.utils.parametrizations.weight_norm(net[0]),
        f"parameter 0.weight {TAKEN_OUT}",
    ),
    "one layer more": (lambda net, _: net.append(nn.Linear(3, 3).double()), f"parameter 4.weight {ADDED}"),
    "a parameter of a layer without": (
        lambda net, _: net[1].register_parameter("slope", nn.Parameter(torch.ones(1).double())),
        f"parameter 1.slope {ADDED}",
    ),
    "a group less": (lambda _, inner: inner.param_groups.clear(), "param groups were added, removed"),
    "another group": (
        lambda _, inner: inner.param_groups.append({"params": [nn.Parameter(torch.ones(2))], "lr": 0.1}),
        "param groups were added, removed or replaced after",
    ),
    "the state of the inner optimizer": (
        lambda _, inner: inner.load_state_dict(optim.SGD(inner.param_groups, lr=0.1).state_dict()),
        "param groups were added, removed or replaced after .* load_state_dict of the Distributed",
    ),
    "a parameter of a group": (
        lambda _, inner: inner.param_groups[0]["params"].append(nn.Parameter(torch.ones(2))),
        '"params" of a param group were changed after',
    ),
    "a parameter less": (
        lambda _, inner: inner.param_groups[0]["params"].pop(),
        '"params" of a param group were changed after',
    ),
    "another state": (
        lambda _, inner: setattr(inner, "state", {}),
        "the optimizer's state was replaced after .* optimizer.state.clear",
    ),
    "a step of the inner optimizer": (lambda _, inner: inner.step(), "step.. of the wrapped optimizer"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1)])
def test_changes_after_the_wrapping_are_refused(run, P: int, K: int, change: str) -> None:
    apply, message = CHANGES[change]

    def train(world: Communicator) -> None:
        topology, net = form(world, groups=P), make_model()
        net[2].requires_grad_(False)
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, topology, hierarchical(2))
        one_step(net, optimizer, topology, 0)
        with pytest.raises(UserError, match=message):
            apply(net, inner)
            optimizer.step()

    run(P * K, train)


@pytest.mark.parametrize("n", [1, 2])
def test_groups_of_one_of_several_optimizers(run, n: int) -> None:
    def train(world: Communicator) -> None:
        net = make_model()
        inner = ChainedOptimizer(*(optim.SGD(layer.parameters(), lr=0.1) for layer in (net[0], net[3])))
        optimizer = DistributedOptimizer(inner, net, form(world), bsp())
        inner.parts[1].param_groups = [dict(inner.parts[1].param_groups[0])]
        with pytest.raises(UserError, match="param groups were added, removed or replaced"):
            optimizer.step()

    run(n, train)


@pytest.mark.parametrize("n", [2])
def test_a_model_that_changed_has_no_mean(run, n: int) -> None:
    def changed(world: Communicator) -> list[str]:
        topology, net, found = form(world, groups=n), make_model(), []
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, topology, hierarchical(2))
        assigned(net)
        for use in (optimizer.averaged_model, optimizer.average_models):
            with pytest.raises(UserError) as error:
                use()
            found.append(str(error.value))
        return found

    for found in run(n, changed):
        assert all(f"parameter 3.bias {REPLACED}" in message for message in found)


@pytest.mark.parametrize("n", [1, 2])
def test_what_cannot_be_wrapped(run, n: int) -> None:
    def refusals(world: Communicator) -> list[str]:
        topology = form(world)

        def message(net: nn.Module, optimizer: optim.Optimizer | None = None) -> str:
            with pytest.raises(UserError) as error:
                DistributedOptimizer(optimizer or optim.SGD(net.parameters(), 0.1), net, topology, bsp())
            return str(error.value)

        net = make_model()
        inner = optim.SGD(net.parameters(), 0.1)
        DistributedOptimizer(inner, net, topology, bsp())
        return [message(net, inner), message(nn.LazyLinear(2))]

    for again, lazy in run(n, refusals):
        assert again.startswith("the optimizer is a DistributedOptimizer already")
        assert lazy.startswith("parameters of the model have no shape yet")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_frozen_parameters_and_buffers_start_from_rank_0(run, n: int) -> None:
    def start(world: Communicator) -> tuple[torch.Tensor, list[float]]:
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
    def train(world: Communicator) -> float:
        topology, nets = form(world), [make_model(), make_model()]
        for net in nets:
            optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, bsp())
            if net is nets[1]:
                net.compile(backend="aot_eager")
            for t in range(3):
                one_step(net, optimizer, topology, t)
        return (vector(nets[0]) - vector(nets[1])).abs().max().item()

    assert max(run(n, train)) < 1e-12
