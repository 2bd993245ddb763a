"""The memory of complex parameters, the state of their optimizer, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from engine.test_complex import OPTIMIZERS, SHAPES, Moduli, adamw, momentum, plain, resolve, steps, trained
from hpcsgd import DistributedOptimizer, UserError, bsp, hierarchical
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.elements import as_reals
from hpcsgd.core.flat import flatten
from hpcsgd.core.rows import in_buckets
from hpcsgd.core.topology import form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.parts.averagers.fragments import fragments
from methods.table import STEPS
from references import batch, loss, vector
from spectral import Operator


def shapes(state: dict[str, Any]) -> dict[Any, Any]:
    return {
        (i, name): (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else type(value)
        for i, values in state["state"].items()
        for name, value in values.items()
    }


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "Moduli"])
@SHAPES
def test_a_state_dict_is_that_of_plain_torch_and_goes_on(run, optimizer: str, P: int, K: int) -> None:
    make = {**OPTIMIZERS, "Moduli": lambda params: Moduli(params, 0.01)}[optimizer]
    options: dict[str, Any] = {"elementwise": True} if optimizer == "Moduli" else {}

    def one(world: Communicator) -> tuple[dict[Any, Any], list[Tensor]]:
        topology = form(world, P)
        nets = [Operator(pairs=False, seed=seed) for seed in (0, 1, 2)]
        whole, resumed = (
            DistributedOptimizer(make(list(net.parameters())), net, topology, hierarchical(100), **options)
            for net in nets[:2]
        )
        steps(nets[0], whole, [world.rank], torch.float64, None, 1)
        state = copy.deepcopy(whole.state_dict())
        for net in nets[1:]:
            net.load_state_dict(copy.deepcopy(nets[0].state_dict()))
        resumed.load_state_dict(copy.deepcopy(state))
        assert same_states(resumed.state_dict(), state)
        alone = make(list(nets[2].parameters()))
        alone.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        for net, each in zip(nets, (whole, resumed, alone), strict=True):
            ranks = (
                [world.rank]
                if each is not alone
                else range(topology.group_index * K, (topology.group_index + 1) * K)
            )
            steps_once(net, each, ranks)
        return shapes(state), [vector(net) for net in nets]

    reference = Operator(pairs=False)
    theirs = make(list(reference.parameters()))
    steps(reference, theirs, [0], torch.float64, None, 1)
    for found, (whole, resumed, alone) in run(P * K, one):
        assert found == shapes(theirs.state_dict())
        assert torch.equal(whole, resumed)
        torch.testing.assert_close(whole, alone, rtol=0, atol=1e-12)


def steps_once(net: nn.Module, optimizer: optim.Optimizer, ranks: Iterable[int]) -> None:
    optimizer.zero_grad()
    batches = [batch(STEPS, rank) for rank in ranks]
    loss(net, *(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
    resolve(net)
    optimizer.step()


def same_states(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return shapes(a) == shapes(b) and all(
        torch.equal(value, b["state"][i][name])
        for i, values in a["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    )


@SHAPES
def test_an_element_is_a_complex_number_for_elementwise_optimizers(run, P: int, K: int) -> None:
    """No shard cuts a complex number, and its two real numbers are not treated as two elements."""
    make = lambda params: Moduli(params, 0.01)  # noqa: E731
    expected = plain(P * K, make)
    for found in run(P * K, lambda world: trained(world, P, make, elementwise=True, bucket_cap_mb=1e-9)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@SHAPES
def test_where_they_lie(run, P: int, K: int, dtype: torch.dtype) -> None:
    """Complex parameters are aligned to whole complex numbers in flat vectors of reals.

    Devices need this. Saving one parameter saves little more than its bytes.
    """

    def one(world: Communicator) -> None:
        net = Operator(pairs=False, dtype=dtype)
        inner = momentum(net.parameters())
        optimizer = DistributedOptimizer(inner, net, form(world, P), bsp(), bucket_cap_mb=1e-9)
        steps(net, optimizer, [world.rank], dtype, None, 1)
        for p in net.parameters():
            assert p.grad is not None
            assert p.data_ptr() % p.element_size() == p.grad.data_ptr() % p.element_size() == 0
            assert p.untyped_storage().nbytes() < 2 * max(p.nbytes, 8 * K * 8)
            assert p.dtype.to_real() == dtype
        for b in optimizer.buckets:
            assert b.w.dtype == dtype
            assert not optimizer.reduces_grads or b.g.dtype == dtype
            assert b.param_shard.numel() % b.reals == 0
        plain = Operator(pairs=False, dtype=dtype, seed=3)
        plain.load_state_dict(net.state_dict())
        assert torch.equal(vector(plain), vector(net))

    run(P * K, one)


@SHAPES
def test_the_mean_model_and_back(run, P: int, K: int) -> None:
    def one(world: Communicator) -> tuple[Tensor, Tensor, Tensor, float]:
        net = Operator(pairs=False, seed=world.rank)
        optimizer = DistributedOptimizer(momentum(net.parameters()), net, form(world, P), hierarchical(100))
        steps(net, optimizer, [world.rank], torch.float64, None, 1)
        before = vector(net)
        with optimizer.averaged_model() as D:
            mean = vector(net)
        return before, mean, vector(net), D

    found = run(P * K, one)
    models = torch.stack([before for before, *_ in found])
    for before, mean, after, D in found:
        torch.testing.assert_close(mean, models.mean(0), rtol=0, atol=1e-12)
        assert torch.equal(before, after)
        apart = torch.stack([(x - models.mean(0)).norm() for x in models]).mean().item()
        assert pytest.approx(apart, abs=1e-12) == D


@SHAPES
def test_the_state_of_the_optimizer_is_averaged_as_reals(run, P: int, K: int) -> None:
    """Each group has every element of both moments exactly once among its ranks."""

    def one(world: Communicator) -> tuple[dict[str, int], int]:
        net = Operator(pairs=False)
        optimizer = DistributedOptimizer(adamw(net.parameters()), net, form(world, P), bsp())
        steps(net, optimizer, [world.rank], torch.float64, None, 1)
        tensors = optimizer.local.tensors()
        assert not any(x.is_complex() for named in tensors.values() for x in named)
        return {name: sum(x.numel() for x in named) for name, named in tensors.items()}, vector(net).numel()

    found = run(P * K, one)
    for name in ("exp_avg", "exp_avg_sq"):
        assert sum(sizes[name] for sizes, _ in found) == found[0][1] * P


@SHAPES
def test_masters_of_more_bits(run, P: int, K: int) -> None:
    """Masters are complex numbers of float64 for parameters of float32; both parts are kept and saved."""

    def one(world: Communicator) -> tuple[Tensor, dict[Any, Any]]:
        net = Operator(pairs=False, dtype=torch.float32)
        topology = form(world, P)
        optimizer = DistributedOptimizer(
            adamw(net.parameters()), net, topology, bsp(), master_dtype=torch.float64
        )
        steps(net, optimizer, [world.rank], torch.float32, None, 1)
        return vector(net), {i: values["master"] for i, values in optimizer.state_dict()["state"].items()}

    expected = plain(P * K, adamw, dtype=torch.float32)
    for found, masters in run(P * K, one):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        wide = torch.cat([as_reals(masters[i]).reshape(-1) for i in sorted(masters)])
        assert wide.dtype == torch.float64
        assert torch.equal(wide.float(), found)


@SHAPES
def test_scaled_gradients_are_unscaled(run, P: int, K: int) -> None:
    """torch's own scaler does not support complex gradients."""

    def one(world: Communicator, scaled: bool) -> tuple[Tensor, int]:
        net = Operator(pairs=False, dtype=torch.float32)
        optimizer = DistributedOptimizer(momentum(net.parameters()), net, form(world, P), hierarchical(2))
        scaler = hpcsgd.GradScaler("cpu", enabled=scaled, init_scale=2.0**10)
        for t in range(STEPS):
            optimizer.zero_grad()
            value = loss(net, *batch(t, world.rank, torch.float32))
            # Only the part of one rank overflows.
            scaler.scale(value * float("inf") if scaled and t == 3 and world.rank == 0 else value).backward()
            if scaled or t != 3:
                scaler.step(optimizer)
                scaler.update()
        return vector(net), optimizer.t

    without = run(P * K, lambda world: one(world, False))
    for (found, t), (expected, _) in zip(run(P * K, lambda world: one(world, True)), without, strict=True):
        assert t == STEPS - 1
        assert torch.equal(found, expected)


def refused(net: nn.Module, kind: Callable[..., optim.Optimizer], world: Communicator) -> str:
    with pytest.raises(UserError) as error:
        DistributedOptimizer(kind(net.parameters()), net, form(world), bsp())
    return str(error.value)


@pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Complex modules are a new feature")
@pytest.mark.parametrize("n", [1, 2])
def test_refusals(run, n: int) -> None:
    """Each message names the parameter."""

    def all_of_them(world: Communicator) -> dict[str, str]:
        def net(dtype: torch.dtype = torch.complex64) -> nn.Module:
            return nn.ParameterDict({"w": torch.ones(2, 3, dtype=dtype)})

        layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).to(torch.complex64))
        topology = form(world)
        optimizer = DistributedOptimizer(momentum(layer.parameters()), layer, topology, bsp())
        found = {"half": refused(net(torch.complex32), momentum, world)}
        for kind in ("Adafactor", "Muon"):
            if hasattr(optim, kind):
                found[kind] = refused(net(), getattr(optim, kind), world)
        with pytest.raises(UserError) as error:
            hpcsgd.NaturalGradient(optimizer, layer)
        found["natural"] = str(error.value)
        with pytest.raises(UserError) as error:
            in_buckets([("w", next(net().parameters()))], 2, 1e6)
        found["rows"] = str(error.value)
        with pytest.raises(hpcsgd.JobError) as error:
            hpcsgd.fully_shard(net(), topology)
        found["shard"] = str(error.value)
        return found

    for found in run(n, all_of_them):
        assert found["half"].startswith("parameter w is of torch.complex32, for which torch lacks")
        for kind in ("Adafactor", "Muon"):
            assert f"parameter w is of torch.complex64, and {kind} updates no" in found.get(kind, found[kind])
        assert "the weight of 1 is of torch.complex64, and estimates are of real" in found["natural"]
        for kind in ("rows", "shard"):
            assert "parameter w is of torch.complex64, and complex ones cannot be sharded" in found[kind]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_muon_leaves_them_to_the_optimizer_of_the_rest() -> None:
    if not hasattr(optim, "Muon"):
        pytest.skip("torch is older than 2.9")
    net = nn.ModuleDict({
        "real": nn.Linear(3, 3, bias=False), "complex": nn.Linear(3, 3, bias=False).to(torch.complex64),
        "out": nn.Linear(3, 2, bias=False),
    })  # fmt: skip
    matrices, rest = (part.param_groups[0]["params"] for part in hpcsgd.muon(net, lr=0.1).parts)
    assert [p is net["real"].weight for p in matrices] == [True]
    assert {p.dtype for p in rest} == {torch.complex64, torch.float32}


@pytest.mark.parametrize("K", [1, 2, 3])
def test_sizes_count_reals(K: int) -> None:
    """The sizes are those of a model with pairs of reals, except for padding to whole complex numbers."""
    complex_, pairs = (
        ModelLayout.of(Operator(pairs=pairs, dtype=torch.float32).named_parameters(), 2, K, 1.0)
        for pairs in (False, True)
    )
    assert complex_.M == pairs.M == 84
    assert sorted(complex_.layers) == sorted(pairs.layers)
    assert {b.width for b in complex_.buckets} == {4}
    for mine, theirs in zip(complex_.buckets, pairs.buckets, strict=True):
        assert mine.used == theirs.used
        assert theirs.padded <= mine.padded < theirs.used + 2 * K


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("F", [1, 2, 5])
def test_every_real_is_in_one_fragment(K: int, F: int) -> None:
    """Each fragment has as many real numbers as with a model of pairs."""
    sizes: dict[bool, list[int]] = {}
    for pairs in (False, True):
        found = [0] * F
        for j in range(K):
            buckets = flatten(list(Operator(pairs=pairs).named_parameters()), K, j, 1e-9)
            parts = fragments(buckets, F)
            for f, part in enumerate(parts):
                found[f] += sum(c.stop - c.start for cuts in part.cuts for c in cuts)
            for i, b in enumerate(buckets):
                times = torch.zeros(b.param_shard.numel())
                for part in parts:
                    for c in part.cuts[i]:
                        times[c] += 1
                assert sum(s.stop - s.start for s in b.filled) == times.sum()
                assert times.max() <= 1
        sizes[pairs] = found
    assert sizes[False] == sizes[True]
    assert sum(sizes[False]) == 84


@pytest.mark.threads
def test_nobody_waits_for_a_gradient_that_is_asked_whether_it_is_conjugated() -> None:
    """Asking whether a gradient is conjugated needs no communication, so one rank alone may ask."""

    def one(world: Communicator) -> list[bool]:
        net = Operator(pairs=False)
        optimizer = DistributedOptimizer(momentum(net.parameters()), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward()
        assert net.lift.grad is not None
        found = [net.lift.grad.is_conj(), net.lift.grad.is_neg()] if world.rank == 0 else [False, False]
        optimizer.step()
        return found

    assert threads.run(2, one) == [[False, False]] * 2
