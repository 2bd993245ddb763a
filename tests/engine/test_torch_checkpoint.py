"""torch.distributed.checkpoint of a DistributedOptimizer's state is refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from references import model as make_model
from references import one_step, vector

OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "no state": lambda net: optim.SGD(net.parameters(), lr=0.1),
    "AdamW": lambda net: optim.AdamW(net.parameters(), lr=0.01),
    "none known": lambda net: Halving(net.parameters(), {"lr": 0.1}),
}


class Halving(optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            param.mul_(0.5)


class Application:
    """A wrapper around a model and an optimizer, as in torch's examples."""

    def __init__(self, net: nn.Module, optimizer: optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["optimizer"])


CALLS: dict[str, Callable[[nn.Module, DistributedOptimizer, Path], Any]] = {
    "get": lambda net, optimizer, _: of_torch.get_state_dict(net, optimizer),
    "get optimizer": lambda net, optimizer, _: of_torch.get_optimizer_state_dict(net, optimizer),
    "set": lambda net, optimizer, _: of_torch.set_optimizer_state_dict(
        net, optimizer, of_torch.get_optimizer_state_dict(net, optim.SGD(net.parameters(), lr=0.1))
    ),
    "save": lambda _, optimizer, folder: save({"o": optimizer}, checkpoint_id=folder, no_dist=True),
    "save an application": lambda net, optimizer, folder: save(
        {"a": Application(net, optimizer)}, checkpoint_id=folder, no_dist=True
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.ranks(2)
def test_refused(run, tmp_path: Path, call: str, optimizer: str, steps: int, scheduled: bool) -> None:
    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        ours = DistributedOptimizer(OPTIMIZERS[optimizer](net), net, topology, hpcsgd.diloco(2))
        if scheduled:
            optim.lr_scheduler.StepLR(ours, 1)
        for t in range(steps):
            one_step(net, ours, topology, t)
        ours.zero_grad()
        before = vector(net)
        line = r"torch.distributed.checkpoint calls (step|state_dict|load_state_dict)\(\) of .* hpcsgd.save"
        with pytest.raises(UserError, match=line):
            CALLS[call](net, ours, tmp_path)
        assert torch.equal(vector(net), before)
        assert ours.t == steps

    run(2, body)


@pytest.mark.ranks(2)
def test_a_learning_rate_of_0_is_allowed(run) -> None:
    """The first step of a warm-up has such a rate."""

    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        inner = optim.SGD(net.parameters(), lr=0.0)
        ours = DistributedOptimizer(inner, net, topology, hpcsgd.hierarchical(2))
        one_step(net, ours, topology, 0)
        assert ours.t == 1

    run(2, body)


STATES: dict[str, Callable[[DistributedOptimizer], dict[str, Any]]] = {
    "in a dict": lambda optimizer: {"o": optimizer.state_dict()},
    "itself": lambda optimizer: optimizer.state_dict(),
    "with others, deep": lambda optimizer: {"all": {"parts": [{"o": optimizer.state_dict()}]}},
    "a copy": lambda optimizer: copy.deepcopy({"o": {**optimizer.state_dict()}}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of", STATES)
@pytest.mark.ranks(2)
def test_a_state_dict_of_the_script_is_refused(run, tmp_path: Path, of: str) -> None:
    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        ours = DistributedOptimizer(optim.AdamW(net.parameters()), net, topology, hpcsgd.diloco(2))
        one_step(net, ours, topology, 0)
        line = r"differs between ranks .*hpcsgd.saved_by\): call hpcsgd.save\(folder, optimizer\)"
        with pytest.raises(CheckpointException, match=line) as raised:
            save(STATES[of](ours), checkpoint_id=tmp_path / str(world.rank), no_dist=True)
        assert [type(error) for error, _ in raised.value.failures.values()] == [UserError]
        assert not list((tmp_path / str(world.rank)).rglob("*.distcp"))

    run(2, body)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2)
def test_a_consolidated_state_can_be_saved(run, tmp_path: Path) -> None:
    """After consolidation one rank has the state of all."""

    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        ours = DistributedOptimizer(optim.AdamW(net.parameters()), net, topology, hpcsgd.diloco(2))
        one_step(net, ours, topology, 0)
        ours.consolidate_state_dict()
        if world.rank == 0:
            save({"o": ours.state_dict()}, checkpoint_id=tmp_path / "all", no_dist=True)

    run(2, body)
    assert (tmp_path / "all" / ".metadata").exists()


@pytest.mark.ranks(2)
def test_a_file_of_torch_save_has_plain_values_alone(run, tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        topology, net = form(world, 2), make_model()
        ours = DistributedOptimizer(optim.AdamW(net.parameters()), net, topology, hpcsgd.diloco(2))
        one_step(net, ours, topology, 0)
        file = tmp_path / f"{world.rank}.pt"
        torch.save(ours.state_dict(), file)
        read = torch.load(file, weights_only=True)
        assert read["hpcsgd"]["saved_by"] == set()
        ours.load_state_dict(read)

    run(2, body)
