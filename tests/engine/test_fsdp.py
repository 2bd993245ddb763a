"""Groups that torch shards with `fully_shard` train the same model as groups that are not sharded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import hpcsgd
from checkpoint.test_snapshot import load, save
from hpcsgd.comm import Communicator
from hpcsgd.core.fsdp import is_fsdp, local
from hpcsgd.core.topology import Topology, form
from hpcsgd.engine.natural_gradient import NaturalGradient
from hpcsgd.errors import JobError, UserError
from hpcsgd.methods import Method, bsp, hierarchical, selsync
from hpcsgd.parts.grad_reduces import Quantized, Sparse
from hpcsgd.parts.quantizers import int4
from hpcsgd.parts.sparsifiers import TopK
from methods.table import RATES, REFERENCES, STEPS
from methods.test_battery import OPTIMIZERS
from references import batch, follow, loss
from references import model as make_model
from trainings import Training

pytestmark = pytest.mark.processes

BY_SHARDS = {label for label in REFERENCES if label.startswith("sparseloco")}
"""These methods select elements by shards, and the shards of FSDP are different."""
REFUSED = {
    "bsp in few bits",
    "hierarchical in few bits",
    "hierarchical with DEFT",
    "hierarchical with ExDyna",
    "ensemble_sync",
    "ensemble_sync with a guard",
    "ensemble_sync, fragments",
    "ensemble_sync, fragments by tokens",
    "ensemble_sync, radial-directional",
}
EQUAL = [label for label in REFERENCES if label not in BY_SHARDS | REFUSED]
OFTEN = {"bsp", "hierarchical", "selsync", "sgp"}
"""These methods run on all shapes; `make test-all` runs the others on 2 × 2."""
SHAPES = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4)]


def shard(net: nn.Module, topology: Topology, **options: Any) -> nn.Module:
    """Shard every module with parameters of its own, and the rest with the net."""
    mesh = topology.mesh()["shard"]
    for module in net.modules():
        if module is not net and next(module.parameters(recurse=False), None) is not None:
            fully_shard(module, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if is_fsdp(x) else x).detach().clone()  # pyright: ignore[reportAttributeAccessIssue]


def vector(net: nn.Module) -> Tensor:
    return torch.cat([whole(p).reshape(-1) for p in net.parameters()])


def trained(
    world: Communicator,
    P: int,
    method: Method,
    make: Callable[[list[nn.Parameter]], optim.Optimizer],
    form: Callable[[Communicator, int], Topology] = form,
    **options: Any,
) -> Tensor:
    topology = form(world, P)
    net = shard(make_model(seed=topology.group_index), topology)  # group 0's start replaces those of others
    optimizer = hpcsgd.DistributedOptimizer(make(list(net.parameters())), net, topology, method, **options)
    set_rate = follow(optimizer, RATES)
    for t in range(STEPS):
        set_rate(t)
        optimizer.zero_grad()
        value = loss(net, *batch(t, topology.rank))
        value.backward()
        optimizer.step(loss=value)
    w, owned = vector(net), sum(b.w.numel() for b in optimizer.buckets)
    assert owned <= w.numel() / topology.group_size + 2 * 7, "it is not sharded"  # padding of rows
    return w


@pytest.mark.parametrize(
    ("method", "P", "K"),
    [
        pytest.param(method, P, K, marks=[] if method in OFTEN or (P, K) == (2, 2) else [pytest.mark.long])
        for method in EQUAL
        for P, K in SHAPES
    ],
)
def test_equals_plain_torch(run, method: str, P: int, K: int) -> None:
    case = REFERENCES[method]
    for name in ["SGD"] if case.plain_sgd else ["momentum", "AdamW"]:
        make = OPTIMIZERS[name]
        (*_, expected) = case.expected(P, K, make)
        for rank, w in enumerate(run(P * K, trained, P, case.new(), make, case.form)):
            torch.testing.assert_close(w, expected[rank // K], rtol=0, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["hierarchical", "bsp"])
@pytest.mark.parametrize(
    "options",
    [{"bucket_cap_mb": 1e-4}, {"overlap_grad_reduce": False}, {"gradient_accumulation_steps": 2}],
    ids=str,
)
def test_however_gradients_travel(run, method: str, options: dict[str, Any]) -> None:
    make, case = OPTIMIZERS["momentum"], REFERENCES[method]

    def in_two_passes(world: Communicator) -> list[Tensor]:
        return twice(world, case.new(), make)

    if "accumulate" not in options:
        *_, expected = case.expected(2, 2, make)
        for rank, w in enumerate(run(4, lambda world: trained(world, 2, case.new(), make, **options))):
            torch.testing.assert_close(w, expected[rank // 2], rtol=0, atol=1e-12)
        return
    for history in run(4, in_two_passes):
        torch.testing.assert_close(history[0], history[1], rtol=0, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["hierarchical", "bsp"])
def test_no_sync_is_as_gradient_accumulation_steps(run, method: str) -> None:
    """torch averages over the group in each pass, and hpcsgd averages over groups once."""

    def train(world: Communicator, steps: int) -> Tensor:
        topology = form(world, 2)
        net = shard(make_model(), topology)
        optimizer = hpcsgd.DistributedOptimizer(
            OPTIMIZERS["momentum"](list(net.parameters())), net, topology, REFERENCES[method].new(),
            gradient_accumulation_steps=steps,
        )  # fmt: skip
        for t in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync() if steps == 1 else nullcontext():
                loss(net, *batch(2 * t, topology.rank)).backward()
            loss(net, *batch(2 * t + 1, topology.rank)).backward()
            optimizer.step()
        return vector(net)

    for equal in run(4, lambda world: torch.equal(train(world, 1), train(world, 2))):
        assert equal


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["hierarchical", "bsp", "diloco"])
def test_one_rank_saves_the_state_of_all(run, tmp_path: Path, method: str) -> None:
    def body(world: Communicator) -> bool:
        topology = form(world, 2)

        def new() -> tuple[nn.Module, hpcsgd.DistributedOptimizer]:
            net = shard(make_model(), topology)
            inner = OPTIMIZERS["AdamW"](list(net.parameters()))
            return net, hpcsgd.DistributedOptimizer(inner, net, topology, REFERENCES[method].new())

        def train(net: nn.Module, optimizer: hpcsgd.DistributedOptimizer, steps: range) -> None:
            for t in steps:
                optimizer.zero_grad()
                loss(net, *batch(t, topology.rank)).backward()
                optimizer.step()

        net, optimizer = new()
        train(net, optimizer, range(3))
        weights = [local(p).clone() for p in net.parameters()]
        optimizer.consolidate_state_dict(to=3)
        if world.rank == 3:
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        train(net, optimizer, range(3, 6))
        again, resumed = new()
        with torch.no_grad():
            for param, x in zip(again.parameters(), weights, strict=True):
                local(param).copy_(x)
        world.barrier()
        resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
        train(again, resumed, range(3, 6))
        return torch.equal(vector(net), vector(again))

    assert all(run(4, body))


def twice(world: Communicator, method: Method, make: Any) -> list[Tensor]:
    """Make two backward passes before each step; torch reduces after each, or only after the second."""
    found = []
    for synced in (True, False):
        topology = form(world, 2)
        net = shard(make_model(), topology)
        assert isinstance(net, FSDPModule)
        optimizer = hpcsgd.DistributedOptimizer(
            make(list(net.parameters())), net, topology, method, gradient_accumulation_steps=2
        )
        for t in range(4):
            optimizer.zero_grad()
            for i in range(2):
                net.set_requires_gradient_sync(synced or i == 1)
                loss(net, *batch(2 * t + i, topology.rank)).backward()
            optimizer.step()
        found.append(vector(net))
    return found


REFUSALS: dict[str, tuple[Callable[[nn.Module, Topology], Any], str]] = {
    "gradient reductions that change gradients": (
        lambda net, topology: wrapped(
            shard(net, topology), topology, hierarchical(2, grad_reduce=Sparse(TopK(0.1)))
        ),
        "Sparse: torch shards the parameters and reduces the gradients of a group itself",
    ),
    "narrow ones": (
        lambda net, topology: wrapped(shard(net, topology), topology, bsp(Quantized(gradients=int4()))),
        "Quantized: torch shards the parameters",
    ),
    "some parameters that are whole": (
        lambda net, topology: wrapped(sharded_in_part(net, topology), topology, bsp()),
        "2.weight is whole, and 0.weight is sharded by torch: call fully_shard(model, ...)",
    ),
    "a mesh of other ranks": (
        lambda net, topology: wrapped(over_all(net, topology), topology, bsp()),
        'this group is ranks [0, 1]: fully_shard(module, mesh=topology.mesh()["shard"])',
    ),
    "optimizers of whole tensors": (
        lambda net, topology: hpcsgd.DistributedOptimizer(
            optim.Adafactor(shard(net, topology).parameters(), lr=0.1), net, topology, bsp()
        ),
        "Adafactor is not known to update every element by itself",
    ),
    "an optimizer of what there was before": (
        lambda net, topology: hpcsgd.DistributedOptimizer(
            optim.SGD(list(net.parameters()), lr=0.1), shard(net, topology), topology, bsp()
        ),
        "parameter 0 of the optimizer is none of the model's, which torch has sharded: make the optimizer",
    ),
    "an optimizer of what a forward pass left": (
        lambda net, topology: wrapped(gathered_for_a_forward_pass(net, topology), topology, bsp()),
        "parameter 0 of the optimizer is none of the model's",
    ),
    "weights that arrive later": (
        lambda net, topology: hpcsgd.DistributedOptimizer(
            optim.SGD(shard(net, topology).parameters(), lr=0.1),
            net,
            topology,
            bsp(),
            overlap_param_gather=True,
        ),
        "overlap_param_gather: torch has sharded the model",
    ),
    "natural gradients": (
        lambda net, topology: NaturalGradient(wrapped(shard(net, topology), topology, bsp()), net),
        "NaturalGradient: torch has sharded 0",
    ),
    "parameters without values": (
        lambda net, topology: wrapped(shard(net.to("meta"), topology), topology, bsp()),
        "parameter 0.weight is on the meta device",
    ),
    "a whole model without values": (
        lambda net, topology: wrapped(net.to("meta"), topology, bsp()),
        "parameter 0.weight is on the meta device",
    ),
}


def wrapped(net: nn.Module, topology: Topology, method: Method) -> hpcsgd.DistributedOptimizer:
    return hpcsgd.DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, topology, method)


def sharded_in_part(net: nn.Module, topology: Topology) -> nn.Module:
    fully_shard(net[0], mesh=topology.mesh()["shard"])  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    return net


def gathered_for_a_forward_pass(net: nn.Module, topology: Topology) -> nn.Module:
    fully_shard(net, mesh=topology.mesh()["shard"])
    loss(net, *batch(0, 0))
    return net


def over_all(net: nn.Module, topology: Topology) -> nn.Module:
    fully_shard(net, mesh=form(topology.world, 1).mesh()["shard"])
    return net


@pytest.mark.ranks(4)
@pytest.mark.parametrize("what", REFUSALS)
def test_refused(run, what: str) -> None:
    attempt, message = REFUSALS[what]

    def refused(world: Communicator) -> bool:
        with pytest.raises((JobError, hpcsgd.UserError)) as caught:
            attempt(make_model(), form(world, 2))
        assert message in str(caught.value), caught.value
        return True

    assert run(4, refused) == [True] * 4


class Net(nn.Module):
    """A model with blocks of two dtypes, tied and frozen weights, unused parameters, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.encode = nn.Linear(5, 5)
        self.decode = nn.Linear(5, 5)
        self.decode.weight = self.encode.weight
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(self.decode(self.encode(self.frozen(x)).tanh()).double())


def of_two_dtypes(net: nn.Module, topology: Topology) -> None:
    mesh = topology.mesh()["shard"]
    for name in ("conv", "head"):
        fully_shard(net.get_submodule(name), mesh=mesh)
    fully_shard(net, mesh=mesh)


def whole_values(training: Training) -> dict[str, Tensor]:
    return {name: whole(x) for name, x in training.everything().items()}


def training(world: Communicator, P: int, sharded: bool, seed: int = 0, **options: Any) -> Training:
    options = {"make": Net, "share": of_two_dtypes if sharded else None, **options}
    return Training(form(world, P), seed=seed, **options)


WAYS = [
    ((2, True), (2, False)),
    ((2, False), (2, True)),
    ((2, True), (2, True)),
    ((2, True), (1, True)),
    ((1, False), (2, True)),
    ((2, True), (4, False)),
    ((4, True), (1, True)),
]
"""The number of groups and whether they are sharded, before and after the checkpoint."""


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("before", "now", "optimizer", "method"),
    [
        pytest.param(
            *way, optimizer, method, marks=[] if (optimizer, method) == quick else [pytest.mark.long]
        )
        for i, way in enumerate(WAYS)
        for quick in [("AdamW", "hierarchical") if i % 2 == 0 else ("momentum", "diloco")]
        for optimizer in ("AdamW", "momentum")
        for method in ("hierarchical", "diloco")
    ],
)
def test_checkpoints_go_from_sharded_to_whole_and_back(
    run, tmp_path: Path, before: tuple[int, bool], now: tuple[int, bool], optimizer: str, method: str
) -> None:
    """With the same number of groups, training continues with the same values up to the order of sums."""

    def goes_on(world: Communicator) -> None:
        first = training(world, *before, optimizer=optimizer, method=method)
        first.steps(4)
        save(first, tmp_path)
        again = training(world, *now, seed=1, optimizer=optimizer, method=method)
        other = training(world, now[0], not now[1], seed=2, optimizer=optimizer, method=method)
        load(again, tmp_path)
        load(other, tmp_path)
        if before[0] == now[0]:
            compare(whole_values(again), whole_values(first))
            first.steps(3)
            again.steps(3)
            compare(whole_values(again), whole_values(first))
        else:
            compare(whole_values(again), whole_values(other))

    run(4, goes_on)


@pytest.mark.ranks(2)
def test_a_checkpoint_after_a_forward_pass(run, tmp_path: Path) -> None:
    """A forward pass leaves the outermost module's weights gathered.

    The checkpoint must not depend on this.
    """

    def looked_at(net: nn.Module) -> None:
        with torch.no_grad():
            net(torch.ones(2, 3, 5, 5))

    def goes_on(world: Communicator) -> None:
        first, again = training(world, 1, True), training(world, 1, True, seed=1)
        first.steps(2)
        looked_at(first.net)
        save(first, tmp_path)
        looked_at(again.net)
        load(again, tmp_path)
        compare(whole_values(again), whole_values(first))

    run(2, goes_on)


@pytest.mark.ranks(2)
def test_frozen_rows_that_differ_between_groups_are_refused(run, tmp_path: Path) -> None:
    def body(world: Communicator) -> None:
        changed = training(world, 2, True)
        save(changed, tmp_path)
        net: Any = changed.net
        local(net.frozen.weight).add_(world.rank)
        with pytest.raises(
            UserError, match=r"frozen parameter frozen.weight, which torch has sharded, differs"
        ):
            save(changed, tmp_path)

    run(2, body)


def compare(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        assert x.dtype == theirs[name].dtype, name
        torch.testing.assert_close(
            x, theirs[name], rtol=2e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["hierarchical", "bsp"])
def test_clipping_by_the_norm_of_all_rows(run, method: str) -> None:
    def norms(world: Communicator, sharded: bool) -> tuple[list[float], Tensor]:
        topology = form(world, 2)
        net = make_model()
        net = shard(net, topology) if sharded else net
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.5), net, topology, REFERENCES[method].new()
        )
        found = []
        for t in range(4):
            optimizer.zero_grad()
            loss(net, *batch(t, topology.rank)).backward()
            found.append(optimizer.clip_grad_norm_(0.1).item())
            optimizer.step()
        return found, vector(net)

    def both(world: Communicator) -> None:
        (mine, w), (theirs, v) = norms(world, True), norms(world, False)
        assert mine == pytest.approx(theirs, rel=1e-12)
        torch.testing.assert_close(w, v, rtol=0, atol=1e-12)

    run(4, both)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", [hierarchical(2), bsp()], ids=["hierarchical", "bsp"])
def test_gradients_that_are_dropped_are_nobodys(run, method: Method) -> None:
    """Otherwise the next backward pass would have two sets of gradients."""

    def kept(world: Communicator) -> int:
        topology = form(world, 2)
        net = shard(make_model(), topology)
        optimizer = wrapped(net, topology, method)
        loss(net, *batch(0, topology.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(held.tensor.grad is not None for held in optimizer.local.held)

    assert run(4, kept) == [0] * 4


class Branches(nn.Module):
    """A model with two branches, which a group uses in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make_model()
        self.second = make_model(1)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.first if self.turn % 2 == 0 else self.second)(x)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["bsp", "diloco", "hierarchical"])
def test_groups_of_which_each_uses_other_parts(run, method: str) -> None:
    def final(world: Communicator, sharded: bool) -> Tensor:
        topology, net = form(world, 2), Branches()
        net = shard(net, topology) if sharded else net
        inner = OPTIMIZERS["momentum"](list(net.parameters()))
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, REFERENCES[method].new())
        for t in range(5):
            optimizer.zero_grad()
            net.turn = topology.group_index + t // 2  # pyright: ignore[reportArgumentType]
            loss(net, *batch(t, topology.rank)).backward()
            optimizer.step()
        return vector(net)

    def both(world: Communicator) -> None:
        torch.testing.assert_close(final(world, True), final(world, False), rtol=0, atol=1e-12)

    run(4, both)


@pytest.mark.ranks(4)
def test_selsync_goes_by_the_norm_of_the_group(run) -> None:
    def deltas(world: Communicator, sharded: bool) -> list[float]:
        topology = form(world, 2)
        net = shard(make_model(), topology) if sharded else make_model()
        optimizer = wrapped(net, topology, selsync(0.05))
        found = []
        for t in range(5):
            optimizer.zero_grad()
            loss(net, *batch(t, topology.rank)).backward()
            optimizer.step()
            found += [optimizer.metrics["delta"], optimizer.metrics["synced"]]
        assert 0 < sum(found[1::2]) < 5, "it always meets, or never"
        return found

    def both(world: Communicator) -> None:
        assert deltas(world, True) == pytest.approx(deltas(world, False), rel=1e-9)

    run(4, both)


@pytest.mark.ranks(4)
def test_inside_the_mean_outside_as_before(run) -> None:
    """The block shows the mean, also if an evaluation leaves the outermost module's weights gathered."""

    def looked_at(world: Communicator) -> None:
        topology = form(world, 2)
        found = []
        for sharded in (True, False):
            net = make_model()
            if sharded:
                fully_shard(net, mesh=topology.mesh()["shard"])
            optimizer = wrapped(net, topology, hierarchical(100))
            values: list[Tensor] = []
            for t in range(4):
                optimizer.zero_grad()
                loss(net, *batch(t, topology.rank)).backward()
                optimizer.step()
                with torch.no_grad():
                    values.append(loss(net, *batch(50, 0)))
                with optimizer.averaged_model() as D, torch.no_grad():
                    values += [torch.tensor(D).double(), loss(net, *batch(50, 0))]
                    values.append(vector(net))
                values.append(vector(net))
            found.append(values)
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)

    run(4, looked_at)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "what", ["recomputing", "compiled", "mixed precision", "offload", "GradScaler", "master"]
)
def test_beside_what_else_torch_does(run, what: str) -> None:
    """Sharded and whole models agree up to rounding."""

    def final(world: Communicator, sharded: bool) -> Tensor:
        topology = form(world, 2)
        dtype = torch.float64 if what in ("recomputing", "compiled") else torch.float32
        net = make_model(dtype=torch.bfloat16 if what == "master" else dtype)
        if what == "recomputing":
            net = nn.Sequential(Recomputed(net[:2]), Recomputed(net[2:]))  # pyright: ignore[reportIndexIssue]
        if what == "compiled":
            net.compile(backend="eager")
        if sharded:
            policies = {
                "mixed precision": {
                    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                },
                "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            }
            shard(net, topology, **policies.get(what, {}))
        options: dict[str, Any] = {"master_dtype": torch.float32} if what == "master" else {}
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net, topology, hierarchical(2), **options
        )
        scaler = hpcsgd.GradScaler("cpu", init_scale=8.0, enabled=what == "GradScaler")
        for t in range(4):
            optimizer.zero_grad()
            x, y = batch(t, topology.rank)
            x = x.to(next(net.parameters()).dtype)
            scaler.scale(
                cross_entropy(net(x).float() if what == "master" else net(x).to(x.dtype), y)
            ).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(local(p).dtype == next(net.parameters()).dtype for p in net.parameters())
        return vector(net).double()

    def both(world: Communicator) -> None:
        exact = {"recomputing": 1e-12, "compiled": 1e-12, "GradScaler": 1e-6, "offload": 1e-6}
        tolerance = exact.get(what, 2e-2)
        torch.testing.assert_close(final(world, True), final(world, False), rtol=0, atol=tolerance)

    run(4, both)


@pytest.mark.ranks(4)
def test_weights_that_have_been_moved_are_noticed(run) -> None:
    def moved(world: Communicator) -> None:
        topology = form(world, 2)
        net = shard(make_model(), topology)
        optimizer = wrapped(net, topology, bsp())
        net.to(torch.float32)
        with pytest.raises(hpcsgd.UserError, match="was moved after DistributedOptimizer was made"):
            optimizer.step()

    run(4, moved)


@pytest.mark.ranks(4)
def test_weights_that_a_forward_pass_has_gathered_are_the_models_own(run) -> None:
    def evaluated(world: Communicator) -> None:
        topology = form(world, 2)
        net = shard(make_model(), topology, reshard_after_forward=False)
        optimizer = wrapped(net, topology, hierarchical(2))
        x, y = batch(0, topology.rank)
        with torch.no_grad():
            cross_entropy(net(x), y)
        assert not all(is_fsdp(p) for p in net.parameters())
        with optimizer.averaged_model() as D:
            assert D == 0
        with torch.no_grad():
            cross_entropy(net(x), y)
        optimizer.average_models()

    run(4, evaluated)
