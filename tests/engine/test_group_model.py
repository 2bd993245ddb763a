"""A warning when a script takes `state_dict()` of one group's model, and no warning elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import hpcsgd
from hpcsgd import DistributedOptimizer, Method, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.engine.around_model import collect_garbage
from methods.table import EXCEPTIONS, REFERENCES, STEPS
from ranks import RANK
from references import model as make_model
from references import one_step

ENTRIES = {**REFERENCES, **EXCEPTIONS}
LINE = (
    "state_dict() of the model: the models of the 2 groups differ now, and this is the one of group 0: for "
    "the mean of all groups, call it inside optimizer.averaged_model(), which all ranks have to enter"
)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "state_dict()" in r.getMessage()]


def trained(
    world: Communicator, P: int, method: Method, steps: int
) -> tuple[nn.Module, DistributedOptimizer]:
    topology, net = form(world, groups=P), make_model()
    optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)
    for t in range(steps):
        one_step(net, optimizer, topology, t)
    return net, optimizer


Look = Callable[[nn.Module, Path], object]
TAKEN: dict[str, Look] = {
    "by torch.save": lambda net, folder: torch.save(net.state_dict(), folder / "model.pt"),
    "of a part": lambda net, _: net.get_submodule("0").state_dict(),
    "of a module around it": lambda net, _: nn.Sequential(net).state_dict(),
    "by get_model_state_dict": lambda net, _: get_model_state_dict(net),
    "by torch.distributed.checkpoint": lambda net, folder: save(
        {"model": net}, checkpoint_id=folder / "all", no_dist=True
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("look", TAKEN)
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
def test_between_synchronizations(
    run, tmp_path: Path, caplog: pytest.LogCaptureFixture, P: int, K: int, look: str
) -> None:
    def body(world: Communicator) -> None:
        net, _optimizer = trained(world, P, hierarchical(3), 2)
        (folder := tmp_path / str(world.rank)).mkdir()
        TAKEN[look](net, folder)
        TAKEN[look](net, folder)  # the second time says nothing

    run(P * K, body)
    assert logged(caplog) == [LINE] * (RANK == 0)


DIFFERING: dict[str, Callable[[], Method]] = {
    "neighbors": hpcsgd.sgp,
    "pairs": lambda: hpcsgd.noloco(1),
    "a random partner": hpcsgd.ad_psgd,
    "a server": lambda: hpcsgd.ssp(max_staleness=1),
    "a late result": lambda: hpcsgd.delayed(hierarchical(1), sync_delay=1),
}


@pytest.mark.parametrize("method", DIFFERING)
@pytest.mark.ranks(3)
def test_after_a_synchronization_that_leaves_groups_different(
    run, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    run(3, lambda world: trained(world, 3, DIFFERING[method](), 3)[0].state_dict())
    assert logged(caplog) == [LINE.replace("2 groups", "3 groups")] * (RANK == 0)


def inside(net: nn.Module, optimizer: DistributedOptimizer, _: Path) -> None:
    with optimizer.averaged_model():
        net.state_dict()


def synchronized(net: nn.Module, optimizer: DistributedOptimizer, _: Path) -> None:
    optimizer.average_models()
    net.state_dict()


def saved(_: nn.Module, optimizer: DistributedOptimizer, folder: Path) -> None:
    hpcsgd.save(folder, optimizer)


def loaded(net: nn.Module, optimizer: DistributedOptimizer, folder: Path) -> None:
    hpcsgd.save(folder, optimizer)
    hpcsgd.load(folder, optimizer)
    net.state_dict()


def elsewhere(net: nn.Module, _optimizer: DistributedOptimizer, _: Path) -> None:
    """Put other values in place, as Lightning's strategy does after `fit`."""
    for param in net.parameters():
        param.data = torch.zeros_like(param)
    net.state_dict()


Use = Callable[[nn.Module, DistributedOptimizer, Path], object]
QUIET: dict[str, tuple[Callable[[], Method], int, Use]] = {
    "before the first step": (lambda: hierarchical(3), 0, lambda net, *_: net.state_dict()),
    "after a synchronization": (lambda: hierarchical(2), 2, lambda net, *_: net.state_dict()),
    "after the outer step": (lambda: hpcsgd.diloco(2), 2, lambda net, *_: net.state_dict()),
    "after average_models": (lambda: hierarchical(3), 2, synchronized),
    "inside averaged_model": (lambda: hierarchical(3), 2, inside),
    "bsp": (bsp, 2, lambda net, *_: net.state_dict()),
    "hpcsgd.save": (lambda: hierarchical(3), 2, saved),
    "hpcsgd.load": (lambda: hierarchical(3), 2, loaded),
    "the parameters themselves": (lambda: hierarchical(3), 2, lambda net, *_: net.state_dict(keep_vars=True)),
    "of a copy": (lambda: hierarchical(3), 2, lambda net, *_: copy.deepcopy(net).state_dict()),
    "of an optimizer": (lambda: hierarchical(3), 2, lambda _, optimizer, __: optimizer.state_dict()),
    "of a module without parameters": (
        lambda: hierarchical(3), 2, lambda net, *_: net.get_submodule("1").state_dict()
    ),
    "of other values": (lambda: hierarchical(3), 2, elsewhere),
}  # fmt: skip


@pytest.mark.parametrize("case", QUIET)
@pytest.mark.ranks(2)
def test_no_warning(run, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    method, steps, look = QUIET[case]

    def body(world: Communicator) -> None:
        net, optimizer = trained(world, 2, method(), steps)
        look(net, optimizer, tmp_path)

    run(2, body)
    assert logged(caplog) == []


@pytest.mark.ranks(2)
def test_no_warning_with_one_group(run, caplog: pytest.LogCaptureFixture) -> None:
    run(2, lambda world: trained(world, 1, hierarchical(3), 2)[0].state_dict())
    assert logged(caplog) == []


@pytest.mark.ranks(2)
def test_no_warning_once_the_optimizer_is_gone(run, caplog: pytest.LogCaptureFixture) -> None:
    def body(world: Communicator) -> None:
        net, optimizer = trained(world, 2, hierarchical(3), 2)
        del optimizer
        collect_garbage()  # also while another rank, a thread, collects
        net.state_dict()

    run(2, body)
    assert logged(caplog) == []


@pytest.mark.ranks(2)
def test_a_model_in_a_file_needs_no_hpcsgd(run) -> None:
    def body(world: Communicator) -> None:
        net, _optimizer = trained(world, 2, hierarchical(3), 2)
        file = pickle.dumps(net)
        assert b"hpcsgd" not in file
        read = pickle.loads(file)
        assert all(torch.equal(x, net.state_dict()[name]) for name, x in read.state_dict().items())

    run(2, body)


@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 1)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_models_that_are_recorded_as_different_differ(run, entry: str, P: int, K: int) -> None:
    """After a synchronization it depends on the method whether groups still differ."""
    case = ENTRIES[entry]

    def body(world: Communicator) -> tuple[list[bool], list[Tensor]]:
        topology, net = case.form(world, P), make_model()
        optimizer = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, case.new())
        steps = [
            (one_step(net, optimizer, topology, t), optimizer._group_model.differs) for t in range(STEPS)
        ]
        return [differs and topology.num_groups > 1 for _, differs in steps], [w for w, _ in steps]

    ranks = run(P * K, body)
    for t in range(STEPS):
        recorded, models = {differs[t] for differs, _ in ranks}, [w[t] for _, w in ranks]
        assert recorded == {False} or any(not torch.equal(w, models[0]) for w in models)
