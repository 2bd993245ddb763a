"""`hpcsgd.QHAdam` against numpy, against torch's AdamW where both are the same, and in local training."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import QHAdam
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.engine.in_parts import is_elementwise
from hpcsgd.errors import UserError
from references import batch, distributed, loss, model, one_step, vector

STEPS = 6
SHAPES = pytest.mark.parametrize(("P", "K"), [(2, 2), (3, 1)])


def by_numpy(
    x: Any, gradients: Any, lr: float, b1: float, b2: float, nu: float, eps: float, wd: float
) -> Any:
    """Compute the paper's formulas as they are printed."""
    u, v = np.zeros_like(x), np.zeros_like(x)
    for g in gradients:
        u = b1 * u + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        x = x - lr * wd * x
        x = x - lr * ((1 - nu) * g + nu * u) / (np.sqrt(v) + eps)
    return x, u, v


def trained(optimizer: optim.Optimizer, params: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    for g in gradients:
        for p in params:
            p.grad = g.to(p.dtype).clone()
        optimizer.step()
    return params


def drawn(n: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    start, *gradients = torch.randn(STEPS + 1, n, generator=generator, dtype=torch.float64).to(dtype)
    return start, gradients


@pytest.mark.parametrize("nu", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_formulas_of_the_paper(nu: float, weight_decay: float) -> None:
    start, gradients = drawn()
    p = nn.Parameter(start.clone())
    optimizer = QHAdam([p], 0.1, (0.7, 0.8), nu, eps=1e-3, weight_decay=weight_decay)
    trained(optimizer, [p], gradients)
    x, u, v = by_numpy(start.numpy(), [g.numpy() for g in gradients], 0.1, 0.7, 0.8, nu, 1e-3, weight_decay)
    for found, expected in (
        (p, x),
        (optimizer.state[p]["exp_avg"], u),
        (optimizer.state[p]["exp_avg_sq"], v),
    ):
        torch.testing.assert_close(found.detach(), torch.from_numpy(expected), rtol=1e-13, atol=1e-13)


def test_defaults_are_the_papers() -> None:
    defaults = QHAdam([nn.Parameter(torch.zeros(1))]).defaults
    assert defaults == {
        "lr": 0.001, "betas": (0.995, 0.999), "nu": 0.95, "eps": 1e-8, "weight_decay": 0.0,
        "bias_correction": False,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_with_the_whole_momentum_and_bias_correction_it_is_adamw_to_the_bit(dtype: torch.dtype) -> None:
    start, gradients = drawn(dtype=dtype)
    ours, torchs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options: dict[str, Any] = {"lr": 0.03, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.1}
    mine = QHAdam([ours], nu=1.0, bias_correction=True, **options)
    adamw = optim.AdamW([torchs], foreach=False, **options)
    trained(mine, [ours], gradients)
    trained(adamw, [torchs], gradients)
    if dtype.is_complex:
        torch.testing.assert_close(ours, torchs)
    else:
        assert torch.equal(ours, torchs)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        torch.testing.assert_close(mine.state[ours][name], adamw.state[torchs][name], rtol=1e-6, atol=1e-7)


def test_at_the_first_step_bias_correction_makes_every_nu_alike() -> None:
    start, gradients = drawn()
    found = []
    for nu in (0.0, 0.5, 1.0):
        p = nn.Parameter(start.clone())
        trained(QHAdam([p], 0.1, nu=nu, bias_correction=True), [p], gradients[:1])
        found.append(p.detach())
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_without_momentum_it_is_rmsprop() -> None:
    start, gradients = drawn()
    ours, torchs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    trained(QHAdam([ours], 0.1, (0.9, 0.8), 0.0, eps=1e-3), [ours], gradients)
    trained(optim.RMSprop([torchs], 0.1, alpha=0.8, eps=1e-3), [torchs], gradients)
    torch.testing.assert_close(ours, torchs, rtol=1e-13, atol=1e-13)


def test_groups_have_options_of_their_own_and_missing_gradients_change_nothing() -> None:
    start, gradients = drawn()
    a, b, idle = (nn.Parameter(start.clone()) for _ in range(3))
    groups = [{"params": [a], "nu": 0.2, "betas": (0.5, 0.6)}, {"params": [b, idle], "lr": 0.3}]
    optimizer = QHAdam(groups, 0.1, (0.7, 0.8), 0.9, eps=1e-3, weight_decay=0.2)
    trained(optimizer, [a, b], gradients)
    as_numpy = [g.numpy() for g in gradients]
    for p, options in ((a, (0.1, 0.5, 0.6, 0.2)), (b, (0.3, 0.7, 0.8, 0.9))):
        expected, _, _ = by_numpy(start.numpy(), as_numpy, *options, 1e-3, 0.2)
        torch.testing.assert_close(p.detach(), torch.from_numpy(expected), rtol=1e-13, atol=1e-13)
    assert torch.equal(idle, start)
    assert idle not in optimizer.state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_updated_in_32_bits_and_rounded_once(dtype: torch.dtype) -> None:
    start, gradients = drawn(dtype=dtype)
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    trained(mine := QHAdam([narrow], 0.1, (0.7, 0.8)), [narrow], gradients[:1])
    trained(theirs := QHAdam([wide], 0.1, (0.7, 0.8)), [wide], gradients[:1])
    assert torch.equal(narrow, wide.to(dtype))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(mine.state[narrow][name], theirs.state[wide][name].to(dtype))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_its_state_continues_to_the_same_bits(copied: Any) -> None:
    start, gradients = drawn()
    straight, again = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = QHAdam([straight], 0.1)
    trained(optimizer, [straight], gradients[:3])
    again.data.copy_(straight)
    resumed = QHAdam([again], 0.9, nu=0.1)
    resumed.load_state_dict(copied(optimizer.state_dict()))
    trained(optimizer, [straight], gradients[3:])
    trained(resumed, [again], gradients[3:])
    assert torch.equal(straight, again)


def test_a_closure_has_gradients_and_its_loss_is_returned() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = QHAdam([p], 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = p.square().sum()
        value.backward()
        return value

    assert optimizer.step(closure).item() == 4.0
    assert p.item() < 2.0


def test_sparse_gradients_are_refused() -> None:
    net = nn.Embedding(4, 2, sparse=True)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="QHAdam does not support sparse gradients"):
        QHAdam(net.parameters()).step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr = -0.1: expected a number ≥ 0"),
        ({"eps": -1.0}, "eps = -1.0"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({"nu": 1.5}, "nu = 1.5: expected a number from 0 to 1"),
        ({"betas": (1.0, 0.9)}, "betas = .*: expected two numbers"),
        ({"betas": (0.9, -0.1)}, "betas = "),
    ],
)
def test_numbers_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        QHAdam([nn.Parameter(torch.zeros(1))], **options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"nu": 1.5}, "QHAdam: nu = 1.5: expected a number from 0 to 1"),
        ({"lr": -0.1}, "QHAdam: lr = -0.1: expected a number ≥ 0"),
        ({"betas": [0.9, 1.0]}, "QHAdam: betas = [0.9, 1.0]: expected two numbers ≥ 0 and < 1"),
    ],
)
def test_numbers_of_a_parameter_group_out_of_bounds_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        QHAdam([{"params": [nn.Parameter(torch.zeros(1))], **options}])
    assert str(refused.value) == line


def made(params: Any) -> QHAdam:
    params = list(params)
    return QHAdam([{"params": params[1::2], "lr": 0.02}, {"params": params[0::2]}], 0.05, (0.8, 0.9), 0.7)


@SHAPES
def test_des_loc_governs_its_moments(run, P: int, K: int) -> None:
    """One process per group is the reference, with means of the parameters, u and v at their intervals."""
    intervals = {"x": 1, "exp_avg": 2, "exp_avg_sq": 3}
    nets = [model() for _ in range(P)]
    optimizers = [made(net.parameters()) for net in nets]
    for t in range(1, STEPS + 1):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            ranks = range(g * K, (g + 1) * K)
            torch.stack([loss(net, *batch(t - 1, rank)) for rank in ranks]).mean().backward()
            optimizer.step()
        for params in zip(*(net.parameters() for net in nets), strict=True):
            states = [o.state[p] for o, p in zip(optimizers, params, strict=True)]
            found = {"x": params} | {name: [s[name] for s in states] for name in ("exp_avg", "exp_avg_sq")}
            for name, tensors in found.items():
                if t % intervals[name] == 0:
                    mean = torch.stack([x.detach() for x in tensors]).mean(0)
                    for x in tensors:
                        x.data.copy_(mean)

    def body(world: Communicator) -> Tensor:
        method = hpcsgd.des_loc(sync_every=1, first_every=2, second_every=3)
        return distributed(world, P, method, made, STEPS)[-1]

    for rank, found in enumerate(run(P * K, body)):
        torch.testing.assert_close(found, vector(nets[rank // K]), rtol=0, atol=1e-12)


@pytest.mark.ranks(3)
def test_each_rank_of_a_group_has_a_part_of_its_state(run) -> None:
    def body(world: Communicator) -> tuple[int, int]:
        net = model()
        inner = made(net.parameters())
        assert is_elementwise(inner)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, 1), hpcsgd.bsp())
        one_step(net, optimizer, optimizer.topology, 0)
        return sum(s["exp_avg"].numel() for s in inner.state.values()), vector(net).numel()

    found = run(3, body)
    assert sum(n for n, _ in found) == found[0][1]
    assert max(n for n, _ in found) < found[0][1] / 2


@pytest.mark.parametrize("now", [(2, 2), (3, 1), (1, 3)])
def test_a_checkpoint_continues_on_other_ranks(run, tmp_path: Path, now: tuple[int, int]) -> None:
    """All groups use the same batches, so that the training does not depend on their number."""
    P, K = now

    def steps(world: Communicator, P: int, first: int, last: int) -> Tensor:
        net = model(world.rank)
        optimizer = hpcsgd.DistributedOptimizer(
            made(net.parameters()), net, form(world, P), hpcsgd.des_loc(2, 2, 2)
        )
        hpcsgd.load(tmp_path, optimizer)
        for t in range(first, last):
            optimizer.zero_grad()
            loss(net, *batch(t, 0)).backward()
            optimizer.step()
        if last < STEPS:
            hpcsgd.save(tmp_path, optimizer)
        return vector(net)

    def resumed(world: Communicator) -> Tensor:
        if world.rank == 0:
            threads.run(4, steps, 2, 0, 4)
        world.barrier()
        return steps(world, P, 4, STEPS)

    net = model()
    optimizer = made(net.parameters())
    for t in range(STEPS):
        optimizer.zero_grad()
        loss(net, *batch(t, 0)).backward()
        optimizer.step()
    for found in run(P * K, resumed):
        torch.testing.assert_close(found, vector(net), rtol=0, atol=1e-12)


@pytest.mark.ranks(4)
def test_bf16_parameters_with_masters_keep_the_small_changes_of_the_momentum(run) -> None:
    def body(world: Communicator) -> tuple[torch.dtype, Tensor]:
        topology, net = form(world, 2), model(dtype=torch.bfloat16)
        inner = QHAdam(net.parameters(), lr=1e-4)
        method = hpcsgd.des_loc(2, 2, 2)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method, master_dtype=torch.float32)
        for t in range(4):
            optimizer.zero_grad()
            loss(net, *batch(t, topology.rank, dtype=torch.bfloat16)).backward()
            optimizer.step()
        state = optimizer.state_dict()["state"][0]
        return state["exp_avg"].dtype, state["master"]

    found = run(4, body)
    for dtype, master in found:
        assert dtype == torch.float32
        torch.testing.assert_close(master, found[0][1], rtol=0, atol=2e-3)
