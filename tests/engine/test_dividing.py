"""Optimizers that need whole tensors have one owner per tensor and train as if every rank updated all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

import hpcsgd
from engine.test_pipeline import in_many_parts, in_the_plain_order
from hpcsgd import (
    DistributedOptimizer,
    Quantized,
    ReduceScatter,
    bsp,
    delayed,
    diloco,
    hierarchical,
    quantizers,
    sgp,
    streaming,
)
from hpcsgd.comm import Communicator
from hpcsgd.core.layout import cut
from hpcsgd.core.topology import form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.engine.dividing import uncut, update_of
from hpcsgd.engine.muon import hidden_matrices, muon
from hpcsgd.engine.plan import StepPlan
from hpcsgd.methods import Method, ensemble_sync
from hpcsgd.models.gpt import gpt
from hpcsgd.parts.grad_reduces import WithAllgather
from references import vector

STEPS = 4
TYPES = 17


class Language(nn.Module):
    """A small GPT with a frozen matrix, an unused one and one of an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt(TYPES, width=12, layers=3, heads=2)
        self.unused = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.mixed = nn.Linear(TYPES, TYPES, bias=False)
        self.last = nn.Linear(TYPES, TYPES)
        generator = torch.Generator().manual_seed(0)  # all threads share torch's global generator
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, device="cpu") / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mixed(self.gpt(x)))


def loss_of(net: nn.Module, t: int, rank: int) -> Tensor:
    x = torch.randint(0, TYPES, (2, 6), generator=torch.Generator().manual_seed(100 * t + rank), device="cpu")
    return cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def trained(
    world: Communicator, P: int, method: Method, make: Callable[[nn.Module], optim.Optimizer], **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Return the trained model, the state of whole parameters, and this rank's number of state elements."""
    topology, net = form(world, groups=P), Language().to(options.pop("dtype", torch.float32))
    options = {"bucket_cap_mb": 5e-3, **options}
    optimizer = DistributedOptimizer(make(net), net, topology, method, **options)
    passes = options.get("accumulate", 1)
    for t in range(STEPS):
        optimizer.zero_grad()
        for i in range(passes):
            loss = loss_of(net, passes * t + i, topology.rank)
            loss.backward()
        optimizer.step(loss=loss)
    kept = sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.dim())
    return {n: p.detach().clone() for n, p in net.named_parameters()}, state_of(optimizer), kept


def state_of(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": x.clone() for i, values in state.items() for name, x in values.items()}


def two_rates(net: nn.Module) -> optim.Optimizer:
    """Return Muon with two parameter groups and AdamW with two more."""
    hidden = hidden_matrices(net)
    rest = [p for p in net.parameters() if p not in set(hidden) and p.requires_grad]
    return hpcsgd.ChainedOptimizer(
        optim.Muon([{"params": hidden[::2], "lr": 0.05}, {"params": hidden[1::2]}], lr=0.02),
        optim.AdamW([{"params": rest[::2], "lr": 0.01}, {"params": rest[1::2]}], lr=0.005),
    )


MAKERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "muon": lambda net: muon(net, lr=0.02),
    "two rates": two_rates,
    "Adafactor": lambda net: optim.Adafactor(net.parameters(), lr=0.02),
}
GATHERED = {"elementwise": False, "tensorwise": False}


def assert_same(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        assert value.stride() == expected[name].stride(), name
        assert torch.equal(value, expected[name]), name


METHODS: dict[str, Callable[[], Method]] = {
    "bsp": bsp,
    "moments averaged": lambda: hierarchical(
        2, optimizer_state=hpcsgd.AverageState, grad_reduce=ReduceScatter()
    ),
    "moments reset": lambda: hierarchical(2, optimizer_state=hpcsgd.ResetState),
    "diloco": lambda: diloco(sync_every=2),
    "streaming": lambda: streaming(diloco(sync_every=2), 2, 1),
    "delayed": lambda: delayed(hierarchical(2), 1),
    "gossip": sgp,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "late": {"overlap_param_gather": True},
    "without overlap": {"overlap_grad_reduce": False},
    "in one bucket": {"bucket_cap_mb": 4.0},
    "with masters": {"dtype": torch.bfloat16, "master_dtype": torch.float32},
    "narrow": {"dtype": torch.bfloat16},
}


def check(run: Any, P: int, K: int, method: Callable[[], Method], maker: str, **options: Any) -> None:
    """Require the same bits as if every rank updated everything."""

    def both(world: Communicator) -> Any:
        return [trained(world, P, method(), MAKERS[maker], **options, **said) for said in ({}, GATHERED)]

    for (model, state, _), (theirs, their_state, _) in run(P * K, both):
        assert_same(model, theirs)
        assert_same(state, their_state)


@pytest.mark.slow
@pytest.mark.threads(unless={"P": 2, "K": 2, "maker": "muon"})
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("P", "K"), [(1, 2), (1, 3), (1, 4), (2, 2), (3, 1)])
def test_as_when_everybody_updates_everything(run, P: int, K: int, maker: str) -> None:
    check(run, P, K, lambda: hierarchical(2), maker)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", METHODS)
def test_so_by_every_kind_of_method(run, method: str) -> None:
    check(run, 2, 2, METHODS[method], "two rates")


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_so_with_every_option(run, options: dict[str, Any]) -> None:
    check(run, 1, 3, lambda: hierarchical(2), "muon", **options)


@pytest.mark.ranks(4)
def test_the_bits_are_those_of_the_plain_order(run) -> None:
    def of_rank(world: Communicator) -> dict[str, Tensor]:
        return trained(world, 2, hierarchical(2), MAKERS["muon"])[0]

    with in_the_plain_order():
        plain = run(4, of_rank)
    with in_many_parts():
        parts = run(4, of_rank)
    for mine, theirs in zip(parts, plain, strict=True):
        assert_same(mine, theirs)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wire", [quantizers.int8, quantizers.bf16])
def test_narrow_wires_take_it(run, wire: Callable[[], Any]) -> None:
    """Narrow formats also work for parameters, which only their owners know."""

    def both(world: Communicator) -> list[dict[str, Tensor]]:
        methods = [hierarchical(2, Quantized(parameters=wire())), hierarchical(2)]
        return [trained(world, 2, method, MAKERS["muon"])[0] for method in methods]

    ranks = run(4, both)
    for rank, (model, exact) in enumerate(ranks):
        assert_same(model, ranks[rank - rank % 2][0])
        for name, value in model.items():
            assert (value - exact[name]).norm() < 0.1 * exact[name].norm(), name


@pytest.mark.ranks(2)
def test_the_state_dict_is_that_of_torch(run) -> None:
    """The keys and shapes are the same, so each optimizer can load the state of the other."""

    def of_rank(world: Communicator) -> bool:
        topology, net, other = form(world), Language(), Language()
        optimizer = DistributedOptimizer(muon(net, 0.02), net, topology, bsp())
        plain = muon(other, 0.02)
        for t in range(2):
            loss_of(net, t, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        plain.load_state_dict(optimizer.state_dict())
        assert_same(state_of(plain), state_of(optimizer))
        again = DistributedOptimizer(muon(other, 0.02), other, topology, bsp())
        again.load_state_dict(plain.state_dict())
        assert_same(state_of(again), state_of(optimizer))
        return set(again.state) != set(plain.state)

    assert run(2, of_rank) == [True, True]


@pytest.mark.ranks(3)
def test_clipping_leaves_the_padding_out(run) -> None:
    """An element-wise optimizer gives the same result, whichever rank owns an element.

    Padding does not count.
    """

    def both(world: Communicator) -> list[tuple[Tensor, Tensor]]:
        found = []
        settings: list[dict[str, Any]] = [{}, {"elementwise": False, "tensorwise": True}]
        for said in settings:
            topology, net = form(world), Language().double()
            inner = optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
            optimizer = DistributedOptimizer(inner, net, topology, bsp(), bucket_cap_mb=5e-3, **said)
            norms = []
            for t in range(STEPS):
                optimizer.zero_grad()
                loss_of(net, t, topology.rank).backward()
                norms += [optimizer.clip_grad_norm_(0.1, p) for p in (2.0, 1.0, float("inf"))]
                optimizer.step()
            found.append((torch.stack(norms), vector(net)))
            padding = sum(b.size for b in optimizer.buckets) - sum(p.numel() for _, p in optimizer.trained)
        assert padding > 0
        return found

    for (norms, w), (their_norms, theirs) in run(3, both):
        torch.testing.assert_close(norms, their_norms, rtol=1e-12, atol=0)
        torch.testing.assert_close(w, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
def test_what_is_not_finite_stays_out_of_the_padding(run) -> None:
    def padded(world: Communicator) -> list[Tensor]:
        topology, net = form(world), Language()
        optimizer = DistributedOptimizer(muon(net, 0.02), net, topology, bsp(), bucket_cap_mb=5e-3)
        (loss_of(net, 0, topology.rank) * float("inf")).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        outside = []
        for b in optimizer.buckets:
            inside = torch.zeros(b.size, dtype=torch.bool)
            for slot in b.slots:
                inside[slot.start : slot.stop] = True
            outside += [b.w[~inside], b.g[~inside]]
        return outside

    for vectors in run(2, padded):
        assert sum(x.numel() for x in vectors) > 0
        assert all(bool((x == 0).all()) for x in vectors)


@pytest.mark.parametrize("K", [2, 3])
def test_state_is_there_once_in_a_group(run, K: int) -> None:
    """A group keeps one momentum per hidden element and two moments per other element.

    Each rank has 1/K of it, up to uneven parts. Unused parameters have no state.
    """
    net = Language()
    hidden = sum(p.numel() for p in hidden_matrices(net)) - net.unused.weight.numel()
    rest = sum(p.numel() for n, p in net.named_parameters() if p.requires_grad and "unused" not in n) - hidden
    kept = [k for _, _, k in run(K, lambda world: trained(world, 1, bsp(), MAKERS["muon"]))]
    assert sum(kept) == hidden + 2 * rest
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    padded = sum(x.size for x in cut(named, K, 5e-3, set(hidden_matrices(net))) if x.whole)
    assert max(kept) <= padded / K + 2 * (rest + K) / K + K


LOOKED_AT = ("gpt.blocks.0.attention.qkv.weight", "gpt.blocks.2.perceptron.out.weight", "mixed.weight")


@pytest.mark.ranks(2)
def test_it_is_the_update_of_the_papers(run) -> None:
    """numpy computes momentum, five Newton-Schulz iterations in 16 bits, and the scale of AdamW's updates."""
    lr, momentum, decay = 0.02, 0.95, 0.1

    def of_rank(world: Communicator) -> list[tuple[Any, Any, Any]]:
        topology, net = form(world), Language()
        optimizer = DistributedOptimizer(muon(net, lr), net, topology, bsp(), bucket_cap_mb=5e-3)
        found = []
        for t in range(3):
            before, copied = arrays(net), Language()
            copied.load_state_dict(net.state_dict())
            ((loss_of(copied, t, 0) + loss_of(copied, t, 1)) / 2).backward()
            optimizer.zero_grad()
            loss_of(net, t, topology.rank).backward()
            optimizer.step()
            found.append((before, {n: p.grad for n, p in copied.named_parameters()}, arrays(net)))
        return found

    for steps in run(2, of_rank):
        for name in LOOKED_AT:
            buffer = 0.0
            for before, gradients, after in steps:
                g = gradients[name].numpy().astype(np.float64)
                buffer = momentum * buffer + (1 - momentum) * g
                update = newton_schulz((1 - momentum) * g + momentum * buffer)
                moved = before[name] * (1 - lr * decay) - after[name]
                expected = lr * 0.2 * max(g.shape) ** 0.5 * update
                assert np.linalg.norm(moved - expected) < 0.02 * np.linalg.norm(expected), name


def arrays(net: nn.Module) -> dict[str, Any]:
    return {n: p.detach().numpy().astype(np.float64) for n, p in net.named_parameters()}


def newton_schulz(g: Any) -> Any:
    x = narrow(g.T if g.shape[0] > g.shape[1] else g)
    x = narrow(x / narrow(np.linalg.norm(x)))
    for _ in range(5):
        gram = narrow(x @ x.T)
        x = narrow(3.4445 * x + narrow(-4.7750 * gram + 2.0315 * gram @ gram) @ x)
    return x.T if g.shape[0] > g.shape[1] else x


def narrow(x: Any) -> Any:
    """Round to the 8 significant bits of bfloat16."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 2**8), exponent - 8)


@pytest.mark.ranks(2)
def test_gradients_may_be_scaled(run) -> None:
    def both(world: Communicator) -> list[Tensor]:
        found = []
        for scaler in (None, hpcsgd.GradScaler("cpu", init_scale=2.0**10)):
            topology, net = form(world), Language()
            optimizer = DistributedOptimizer(
                muon(net, 0.02), net, topology, hierarchical(2), bucket_cap_mb=5e-3
            )
            for t in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(net, t, topology.rank)
                (loss if scaler is None else scaler.scale(loss)).backward()
                optimizer.step() if scaler is None else scaler.step(optimizer)
                if scaler is not None:
                    scaler.update()
            found.append(vector(net))
        return found

    for plain, scaled in run(2, both):
        assert torch.equal(plain, scaled)


@pytest.mark.ranks(3)
def test_the_layout_is_predicted(run) -> None:
    def of_rank(world: Communicator) -> Any:
        topology, net = form(world), Language()
        optimizer = DistributedOptimizer(muon(net, 0.02), net, topology, bsp(), bucket_cap_mb=5e-3)
        sizes = [(sum(s.stop - s.start for s in b.slots), b.size) for b in optimizer.buckets]
        return sizes, sum(len(b.ranges) for b in optimizer.buckets)

    net = Language()
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    m = ModelLayout.of(named, 1, 3, 5e3, whole=set(hidden_matrices(net)))
    ranks = run(3, of_rank)
    assert all(sizes == [(b.used, b.padded) for b in m.buckets] for sizes, _ in ranks)
    assert sum(pieces for _, pieces in ranks) / 3 == m.rows_of(range(len(m.layers)))
    assert sum(b.used for b in m.buckets) == sum(p.numel() for _, p in named)


def test_groups_own_no_tensors() -> None:
    """With `ensemble_sync` ranks own no tensors.

    Groups may differ in K, and they average models that have the same layout.
    """
    net = Language()
    optimizer = muon(net, 0.02)
    for method, gathered in ((bsp(), False), (ensemble_sync(2), True)):
        plan = StepPlan.of(method, update_of(optimizer))
        assert isinstance(plan.grad_reduce, WithAllgather) == gathered
        assert set(uncut(plan, optimizer, K=2)) == (set() if gathered else set(hidden_matrices(net)))


@pytest.mark.ranks(3)
def test_much_padding_is_reported(run, caplog: pytest.LogCaptureFixture) -> None:
    def wrap(world: Communicator) -> None:
        net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        inner = muon(net, 0.02, hidden=["0.weight"])
        DistributedOptimizer(inner, net, form(world), bsp())

    run(3, wrap)
    told = [r.getMessage() for r in caplog.records if "padding" in r.getMessage()]
    assert all("% of the flat vectors is padding" in message for message in told)
    assert len(told) <= 1  # only rank 0 logs it
