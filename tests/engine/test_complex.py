"""Complex parameters train as in plain torch, as pairs of real numbers, which only the flat vectors show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import DistributedOptimizer, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from methods.table import RATES, REFERENCES, STEPS
from references import MakeOptimizer, batch, distributed, loss, same, vector
from spectral import Operator, as_references, as_trained

SHAPES = pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
BY_PLACE = {
    label for label in REFERENCES if any(x in label for x in ("few bits", "DEFT", "ExDyna", "sparse"))
}
"""These methods select elements by their positions, so the buckets have to be those of the reference."""
OFTEN = {
    "bsp",
    "hierarchical",
    "diloco",
    "selsync",
    "sgp",
    "hierarchical with DEFT",
    "hierarchical in few bits",
}


def adamw(params: Any) -> optim.Optimizer:
    """Return AdamW with an ε so large that rounding errors do not become steps."""
    return optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=0.01)


def momentum(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": momentum,
    "AdamW": adamw,
    "Adam": lambda params: optim.Adam(params, lr=0.01, weight_decay=0.1, eps=0.01, amsgrad=True),
    "NAdam": lambda params: optim.NAdam(params, lr=0.01, eps=0.01),
    "RAdam": lambda params: optim.RAdam(params, lr=0.01, eps=0.01),
    "Adamax": lambda params: optim.Adamax(params, lr=0.01, eps=0.01),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1, eps=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda params: optim.Adadelta(params, lr=0.1, eps=0.01),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.01, eps=0.01, centered=True, momentum=0.5),
    "ASGD": lambda params: optim.ASGD(params, lr=0.01),
}


def in_groups(net: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in net.parameters() if p.requires_grad]
    return [{"params": params[1::2], "lr": 0.02, "weight_decay": 0.0}, {"params": params[::2]}]


class Moduli(optim.Optimizer):
    """Adam as libraries for neural operators have it.

    The second moment of a complex element is that of its absolute value, a real number.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state.update(mean=torch.zeros_like(p), squares=torch.zeros_like(p.abs()))
            state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["squares"].mul_(0.99).add_((p.grad * p.grad.conj()).real, alpha=0.01)
            p.sub_(state["mean"] / (state["squares"].sqrt() + 0.01), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in OFTEN else pytest.mark.long) for m in REFERENCES]
)
@SHAPES
def test_methods_train_pairs_of_reals(run, monkeypatch, method: str, P: int, K: int) -> None:
    """Complex parameters train as the plain-torch reference trains the same numbers in real parameters."""
    case, mixed = REFERENCES[method], method not in BY_PLACE
    make = adamw if mixed and not case.plain_sgd else lambda params: optim.SGD(params, lr=0.1)
    as_references(monkeypatch, mixed=mixed)
    expected = case.expected(P, K, make)
    as_trained(monkeypatch, mixed=mixed)

    def trained(world: Communicator) -> list[Tensor]:
        return distributed(world, P, case.new(), make, STEPS, rates=RATES, form=case.form)

    same(run(P * K, trained), expected, K)


Between = Callable[[nn.Module, optim.Optimizer], object]
"""A change made between `backward()` and `step()`."""


def clipped(order: float) -> Between:
    def clip(net: nn.Module, optimizer: optim.Optimizer) -> object:
        if isinstance(optimizer, DistributedOptimizer):
            return optimizer.clip_grad_norm_(0.1, order)
        return nn.utils.clip_grad_norm_(net.parameters(), 0.1, order)

    return clip


def clipped_by_torch(_: nn.Module, optimizer: optim.Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(params, 0.1)


def edited(net: nn.Module, _: optim.Optimizer) -> None:
    assert isinstance(net, Operator)
    assert net.lift.grad is not None
    assert net.bias.grad is not None
    net.lift.grad.mul_(0.5j)
    torch.view_as_real(net.bias.grad)[..., 1] = 0.25


def trained(
    world: Communicator, P: int, make: Callable[[Any], optim.Optimizer], method: Callable[[], Any] = bsp, *,
    dtype: torch.dtype = torch.float64, between: Between | None = None, passes: int = 1, frozen: bool = False,
    by_groups: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Train as `plain` does, on all ranks together, and return the parameters."""
    net = Operator(pairs=False, dtype=dtype, seed=world.rank)
    net.lift.requires_grad_(not frozen)
    inner = make(in_groups(net) if by_groups else list(net.parameters()))
    optimizer = DistributedOptimizer(
        inner, net, form(world, P), method(), gradient_accumulation_steps=passes, **options
    )
    steps(net, optimizer, [world.rank], dtype, between, passes)
    assert {p.dtype for p in net.parameters()} == {dtype, dtype.to_complex()}
    return vector(net)


def plain(
    N: int, make: Callable[[Any], optim.Optimizer], *, dtype: torch.dtype = torch.float64,
    between: Between | None = None, passes: int = 1, frozen: bool = False, by_groups: bool = False,
) -> Tensor:  # fmt: skip
    """Train complex parameters in one process of plain torch on the batch of N ranks; return them."""
    net = Operator(pairs=False, dtype=dtype)
    net.lift.requires_grad_(not frozen)
    optimizer = make(in_groups(net) if by_groups else list(net.parameters()))
    steps(net, optimizer, range(N), dtype, between, passes)
    return vector(net)


def resolve(net: nn.Module) -> None:
    for p in net.parameters():
        if p.grad is not None and p.grad.is_conj():
            p.grad = p.grad.resolve_conj()


def steps(
    net: nn.Module, optimizer: optim.Optimizer, ranks: Iterable[int], dtype: torch.dtype,
    between: Between | None, passes: int,
) -> None:  # fmt: skip
    for t in range(STEPS):
        optimizer.zero_grad()
        for k in range(passes):
            batches = [batch(passes * t + k, rank, dtype) for rank in ranks]
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            (loss(net, x, y) / passes).backward()
        if between is clipped_by_torch or not isinstance(optimizer, DistributedOptimizer):
            resolve(net)  # torch's optimizers and its clipping of lists do not support unresolved conjugates
        if between is not None:
            between(net, optimizer)
        optimizer.step()


SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"make": make} for name, make in OPTIMIZERS.items()},
    "in groups": {"make": adamw, "by_groups": True},
    "accumulated": {"make": momentum, "passes": 2},
    "frozen": {"make": momentum, "frozen": True},
    "clipped": {"make": momentum, "between": clipped(2.0)},
    "clipped by the largest": {"make": momentum, "between": clipped(float("inf"))},
    "clipped by sums": {"make": momentum, "between": clipped(1.0)},
    "clipped by torch": {"make": momentum, "between": clipped_by_torch},
    "edited": {"make": adamw, "between": edited},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"overlap_grad_reduce": False},
    "prefetch": {"overlap_param_gather": True},
    "many buckets": {"bucket_cap_mb": 1e-5},
    "whole tensors": {"elementwise": False, "tensorwise": True},
    "whole models": {"elementwise": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
@SHAPES
def test_it_is_the_training_of_plain_torch(run, setting: str, P: int, K: int) -> None:
    expected = plain(P * K, **SETTINGS[setting])
    for found in run(P * K, lambda world: trained(world, P, **SETTINGS[setting])):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("setting", ["in groups", "edited", "accumulated"])
@SHAPES
def test_so_with_every_option(run, option: str, setting: str, P: int, K: int) -> None:
    chosen = {**SETTINGS[setting], **OPTIONS[option]}
    expected = plain(P * K, **SETTINGS[setting])
    for found in run(P * K, lambda world: trained(world, P, **chosen)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@SHAPES
def test_single_precision(run, P: int, K: int) -> None:
    expected = plain(P * K, adamw, dtype=torch.float32)
    for found in run(P * K, lambda world: trained(world, P, adamw, dtype=torch.float32)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@SHAPES
def test_gradients_that_are_replaced(run, P: int, K: int) -> None:
    """A script may replace averaged gradients by conjugated ones.

    Parameters whose gradients it drops are not updated.
    """

    def replaced(net: nn.Module, optimizer: optim.Optimizer) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.synchronize()
        assert isinstance(net, Operator)
        assert net.lift.grad is not None
        net.lift.grad = (net.lift.grad * 2).conj()
        net.bias.grad = None
        if not isinstance(optimizer, DistributedOptimizer):
            resolve(net)

    expected = plain(P * K, momentum, between=replaced)
    for found in run(P * K, lambda world: trained(world, P, momentum, between=replaced)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [bsp, lambda: hierarchical(2)])
@SHAPES
def test_a_gradient_on_some_ranks_alone(run, P: int, K: int, method: Callable[[], Any]) -> None:
    """The gradient counts as zero on the other ranks.

    If no rank has one, the parameter stays unchanged, momentum or not.
    """

    def one(world: Communicator) -> tuple[list[Tensor], Tensor]:
        net = nn.ParameterList([torch.ones(3, dtype=torch.complex128) for _ in range(3)])
        topology = form(world, P)
        optimizer = DistributedOptimizer(adamw(net.parameters()), net, topology, method())
        everywhere, once, _ = net
        for t in range(4):
            optimizer.zero_grad()
            y = (everywhere * (2 + 1j)).real.sum()
            y = y + (once * 1j).real.sum() if t > 0 and topology.shard_index == 0 else y
            y.backward()
            optimizer.step()
        return [x.detach().clone() for x in net], optimizer.local.tensors().get("exp_avg", [torch.ones(0)])[0]

    def alone() -> list[Tensor]:
        net = nn.ParameterList([torch.ones(3, dtype=torch.complex128) for _ in range(3)])
        optimizer = adamw(net.parameters())
        for t in range(4):
            optimizer.zero_grad()
            y = (net[0] * (2 + 1j)).real.sum()
            (y + (net[1] * 1j).real.sum() / K if t > 0 else y).backward()
            optimizer.step()
        return [x.detach().clone() for x in net]

    for found, _ in run(P * K, one):
        torch.testing.assert_close(found, alone(), rtol=0, atol=1e-12)
