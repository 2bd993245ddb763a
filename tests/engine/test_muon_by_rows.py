"""Muon for models that torch shards: updates of whole matrices, and MuonBP's updates of blocks of rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from checkpoint.test_snapshot import load, save
from engine.test_fsdp import Branches, shard, vector, whole
from hpcsgd import bsp, diloco, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.core.fsdp import local
from hpcsgd.core.matrices import bytes_by_period, owners, rows_by_rank
from hpcsgd.core.topology import form
from hpcsgd.engine.dividing import update_of
from hpcsgd.engine.muon_by_rows import MOMENTUM, MuonByRows, newton_schulz, periods
from hpcsgd.engine.optimizer_param import OptimizerParam
from hpcsgd.engine.plan import StepPlan
from hpcsgd.methods import Method
from references import batch, loss
from trainings import Training

LR, ROUNDING = 0.02, 1e-4
"""A step changes an element by about LR · 0.2.

bfloat16 rounding of results in another order is far smaller.
"""
SHAPES = [(9, 5), (7, 9), (7, 7), (2, 7), (9, 2), (1, 9), (4, 1), (7, 4), (3, 7)]
"""Shapes with numbers of rows that do not divide evenly, and with fewer rows than ranks."""


class Net(nn.Module):
    """A model with matrices of many shapes, an unused one, and vectors, which AdamW trains."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(n, m) for m, n in SHAPES]
        self.layers, self.unused = nn.ModuleList(layers), nn.Linear(5, 4)
        generator = torch.Generator().manual_seed(0)
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def muon(net: nn.Module, **options: Any) -> hpcsgd.ChainedOptimizer:
    return hpcsgd.muon(net, LR, hidden=["layers.*.weight", "unused.weight"], rest={"lr": 0.01}, **options)


def trained(
    world: Communicator, P: int, method: Method, steps: int, *, sharded: bool = True, **options: Any
) -> Iterator[tuple[nn.Module, hpcsgd.DistributedOptimizer]]:
    """Train, and yield the model and the optimizer after each step."""
    topology, net = form(world, P), Net()
    net = shard(net, topology) if sharded else net
    optimizer = hpcsgd.DistributedOptimizer(muon(net, **options), net, topology, method, bucket_cap_mb=3e-4)
    for t in range(steps):
        optimizer.zero_grad()
        loss(net, *batch(t, topology.rank)).backward()
        optimizer.step()
        yield net, optimizer


def in_plain_torch(ranks: int, steps: int, **options: Any) -> Iterator[tuple[nn.Module, optim.Optimizer]]:
    """Train with torch's own Muon on whole matrices, with the mean gradient of all ranks."""
    net = Net()
    optimizer = muon(net, **options)
    for t in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss(net, *batch(t, rank)) / ranks).backward()
        optimizer.step()
        yield net, optimizer


def final(steps: Iterator[tuple[nn.Module, Any]]) -> Tensor:
    *_, (net, _) = steps
    return vector(net)


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "original"}], ids=str)
@pytest.mark.parametrize(("P", "K"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_the_update_is_that_of_whole_matrices(run, P: int, K: int, options: dict[str, Any]) -> None:
    expected = final(in_plain_torch(P * K, 3, **options))
    start = vector(Net())
    assert (expected - start).abs().median() > 10 * ROUNDING
    for w in run(P * K, lambda world: final(trained(world, P, bsp(), 3, **options))):
        torch.testing.assert_close(w, expected, rtol=0, atol=ROUNDING)


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "method", [lambda: hierarchical(2, optimizer_state=hpcsgd.AverageState), lambda: diloco(2)], ids=[0, 1]
)
def test_groups_train_as_those_that_are_not_sharded(run, method: Any) -> None:
    """Each row is averaged with the same row of other groups.

    Matrices without an update have a state, too.
    """

    def both(world: Communicator) -> None:
        mine, theirs = (final(trained(world, 2, method(), 4, sharded=each)) for each in (True, False))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=ROUNDING)

    run(4, both)


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", [bsp, lambda: hierarchical(2)], ids=["bsp", "hierarchical"])
def test_groups_of_which_each_uses_other_matrices(run, method: Any) -> None:
    def after(world: Communicator, sharded: bool) -> Tensor:
        topology, net = form(world, 2), Branches()
        net = shard(net, topology) if sharded else net
        inner = hpcsgd.muon(net, LR, hidden=["*.0.weight", "*.3.weight"])
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method())
        for t in range(4):
            optimizer.zero_grad()
            net.turn = topology.group_index + t // 2  # pyright: ignore[reportArgumentType]
            loss(net, *batch(t, topology.rank)).backward()
            optimizer.step()
        return vector(net)

    def both(world: Communicator) -> None:
        torch.testing.assert_close(after(world, True), after(world, False), rtol=0, atol=ROUNDING)

    run(4, both)


def orthogonal(x: Tensor) -> Tensor:
    """Return −lr · the orthogonalized `x`, scaled by its shape, as torch's own Muon computes it."""
    update = torch.zeros_like(x)
    update.grad = x
    optim.Muon(
        [update], lr=LR, weight_decay=0, momentum=0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ).step()
    return update


@pytest.mark.processes
@pytest.mark.parametrize("K", [2, 4])
def test_blocks_are_orthogonalized_between_whole_steps(run, K: int) -> None:
    """MuonBP uses whole matrices in steps 0, 3, …, and otherwise each rank's rows, scaled by their shape."""
    period, steps, momentum = 3, 5, 0.95

    def check(world: Communicator) -> None:
        net = Net()
        buffers = {p: torch.zeros_like(p) for p in net.parameters()}
        rest = [p for p in net.parameters() if p.dim() == 1]
        vectors = optim.AdamW(rest, lr=0.01, weight_decay=0.1)
        for t, (mine, _) in enumerate(trained(world, 1, bsp(), steps, period=period)):
            net.zero_grad()
            for rank in range(K):
                (loss(net, *batch(t, rank)) / K).backward()
            with torch.no_grad():
                for p, buffer in buffers.items():
                    if p.dim() == 2 and p.grad is not None:
                        buffer.mul_(momentum).add_(p.grad, alpha=1 - momentum)
                        direction = momentum * buffer + (1 - momentum) * p.grad
                        blocks = [direction] if t % period == 0 else direction.chunk(K)
                        p.mul_(1 - LR * 0.1).add_(torch.cat([orthogonal(block) for block in blocks]))
            vectors.step()
            torch.testing.assert_close(vector(mine), vector(net), rtol=0, atol=ROUNDING)
        assert (vector(net) - final(in_plain_torch(K, steps))).abs().max() > 10 * ROUNDING

    run(K, check)


@pytest.mark.processes
@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize("period", [1, 3])
def test_bytes_are_those_of_two_messages_a_matrix(run, K: int, period: int) -> None:
    def sent(world: Communicator) -> list[float]:
        found = []
        for _, optimizer in trained(world, 1, bsp(), 4, period=period):
            total = optimizer.topology.world.stats.totals().get("muon")
            found.append(0.0 if total is None else total.bytes)
        return found

    net, by_step = Net(), zip(*run(K, sent), strict=True)
    (each,) = bytes_by_period(periods_in_order(net), K).values()
    assert each <= 2 * sum(m * n for m, n in [*SHAPES, (4, 5)]) / K
    wanted = [2 * each * (t // period + 1) for t in range(4)]
    assert [sum(ranks) / K for ranks in by_step] == pytest.approx(wanted)


def periods_in_order(net: nn.Module) -> dict[nn.Parameter, int]:
    known = periods(muon(net))
    return {p: known[p] for p in reversed(list(net.parameters())) if p in known}


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize("now", [(1, True), (1, False), (2, True), (4, True)], ids=str)
def test_a_checkpoint_goes_on_at_its_place_in_the_period(run, tmp_path: Path, now: tuple[int, bool]) -> None:
    """On the same ranks training continues with the same bits; on others it starts from the same state."""

    def new(world: Communicator, P: int, sharded: bool) -> Training:
        return Training(form(world, P), "muon by rows", bsp, make=Net, share=shard if sharded else None)

    def step(training: Training, t: int) -> None:
        training.optimizer.zero_grad()
        loss(training.net, *batch(t, training.optimizer.topology.rank)).backward()
        training.optimizer.step()

    def goes_on(world: Communicator) -> None:
        first, again = new(world, 1, True), new(world, *now)
        for t in range(2):
            step(first, t)
        save(first, tmp_path)
        load(again, tmp_path)
        assert again.optimizer.param_groups[0]["steps"] == 2
        assert torch.equal(vector(again.net), vector(first.net))
        for i, state in first.optimizer.state_dict()["state"].items():
            torch.testing.assert_close(again.optimizer.state_dict()["state"][i], state, rtol=0, atol=0)
        for t in (2, 3):  # first by blocks, then by whole matrices
            step(first, t)
            step(again, t)
        if now == (1, True):
            assert torch.equal(vector(again.net), vector(first.net))

    run(4, goes_on)


@pytest.mark.processes
@pytest.mark.ranks(2)
def test_the_state_starts_anew(run) -> None:
    def reset(world: Communicator) -> None:
        *_, (_, optimizer) = trained(world, 1, bsp(), 1)
        tensors = optimizer.local.tensors()[MOMENTUM]
        assert len(tensors) == sum(held.param.dim() == 2 for held in optimizer.local.held)
        assert any(bool(x.any()) for x in tensors)
        optimizer.local.reset()
        assert not any(bool(x.any()) for x in optimizer.local.tensors()[MOMENTUM])

    run(2, reset)


@pytest.mark.processes
@pytest.mark.ranks(2)
def test_muon_alone_and_master_weights(run) -> None:
    """Muon also works without a chained optimizer, on bfloat16 with float32 master weights."""

    def after(world: Communicator, sharded: bool) -> Tensor:
        topology = form(world, 1)
        net = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))).to(torch.bfloat16)
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.copy_(torch.randn(5, 5, generator=torch.Generator().manual_seed(i)))
        net = shard(net, topology) if sharded else net
        inner = optim.Muon(net.parameters(), lr=LR)
        scheduler = optim.lr_scheduler.ExponentialLR(inner, 0.9)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, bsp(), master_dtype=torch.float32)
        for t in range(3):
            optimizer.zero_grad()
            x, y = batch(t, 0, torch.float32)
            nn.functional.cross_entropy(net(x.bfloat16()).float(), y).backward()
            optimizer.step()
            with warnings.catch_warnings(action="error"):  # torch warns if it has not noticed the step
                scheduler.step()
        return torch.cat([whole(p).reshape(-1).float() for p in net.parameters()])

    def both(world: Communicator) -> None:
        torch.testing.assert_close(after(world, True), after(world, False), rtol=2**-7, atol=1e-3)

    run(2, both)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4), (4, 1), (6, 6)])
@pytest.mark.parametrize("ns_steps", [1, 5])
def test_the_iteration_is_torchs(shape: tuple[int, int], ns_steps: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    (options,) = optim.Muon([copy.deepcopy(x)], lr=1.0, ns_steps=ns_steps, weight_decay=0).param_groups
    param = torch.zeros_like(x)
    param.grad = x
    optim.Muon([param], lr=1.0, ns_steps=ns_steps, weight_decay=0, momentum=0, nesterov=False).step()
    ratio = max(1.0, shape[0] / shape[1]) ** 0.5
    torch.testing.assert_close(
        newton_schulz(x.bfloat16(), options).float(), -param / ratio, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("period", [1, 3])
def test_rows_on_threads_have_the_bits_of_whole_matrices(run, K: int, period: int) -> None:
    """Without torch's sharding, whole steps have the bits of torch's own Muon.

    The other steps have its bits with each rank's rows as a matrix.
    """
    options: dict[str, Any] = {"lr": LR, "adjust_lr_fn": "match_rms_adamw"}

    def random(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]

    def of_rank(world: Communicator) -> None:
        params = [nn.Parameter(x) for x in random(0)]
        inner = optim.Muon(params, **options)
        inner.param_groups[0]["period"] = period
        by_rows = MuonByRows(inner, params, world)
        blocks = [list(p.detach().clone().chunk(K)) for p in params]
        held = [
            OptimizerParam(i, p, rows[world.rank].flatten(), 0, 0)
            for i, (p, rows) in enumerate(zip(params, blocks, strict=True))
            if world.rank < len(rows)
        ]
        for t in range(4):
            for each in held:
                each.tensor.grad = random(t + 1)[each.index].chunk(K)[world.rank].flatten()
            before = {each.index: each.tensor.clone() for each in held}
            momenta = {each.index: inner.state[each.tensor][MOMENTUM] for each in held} if t else {}
            momenta = {i: x.clone() for i, x in momenta.items()}
            by_rows.step(held)
            gathered = world.gather_objects((before, momenta))
            for each in held:
                i, mine = each.index, world.rank
                whole_now = t % period == 0
                ranks = [r for r in range(K) if i in gathered[r][0]] if whole_now else [mine]
                param = torch.cat([gathered[r][0][i] for r in ranks]).view(-1, SHAPES[i][1])
                gradient = random(t + 1)[i].chunk(K)
                param.grad = torch.cat([gradient[r] for r in ranks])
                plain = optim.Muon([param], **options)
                if t:
                    momentum = torch.cat([gathered[r][1][i] for r in ranks])
                    plain.state[param][MOMENTUM] = momentum.view(param.shape)
                plain.step()
                rows = param.chunk(K)[mine] if whole_now else param
                torch.testing.assert_close(each.tensor, rows.flatten(), rtol=0, atol=1e-14)

    run(K, of_rank)


@pytest.mark.ranks(2)
def test_rows_without_a_gradient_stay_and_hold_nobody_up(run) -> None:
    """Rows without a gradient stay unchanged, also if the other rank has a gradient."""

    def of_rank(world: Communicator) -> list[bool]:
        params = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
        by_rows = MuonByRows(optim.Muon(params, lr=LR), params, world)
        held = [OptimizerParam(i, p, torch.ones(6), 0, 0) for i, p in enumerate(params)]
        for each in held:
            lacking = each.index == 0 or (each.index == 1 and world.rank == 1)
            each.tensor.grad = None if lacking else torch.ones(6)
        by_rows.step(held)
        return [torch.equal(each.tensor, torch.ones(6)) for each in held]

    assert run(2, of_rank) == [[True, False, False], [True, True, False]]


def test_work_is_divided() -> None:
    assert sorted(owners([torch.Size((4, 4))] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    assert rows_by_rank(torch.Size((7, 2)), 3) == [3, 3, 1]
    assert rows_by_rank(torch.Size((2, 2)), 3) == [1, 1, 0]


@pytest.mark.parametrize("K", [1, 2, 3])
def test_the_bytes_of_a_matrix_are_those_of_the_rows_that_its_owner_lacks(K: int) -> None:
    """The owner of 6 × 2 elements of two bytes lacks all rows but its own; K ranks share the bytes."""
    found = bytes_by_period({nn.Parameter(torch.ones(6, 2)): 1, nn.Parameter(torch.ones(6, 2)): 3}, K)
    each = 2 * (6 - 6 // K) * 2 / K
    assert found == pytest.approx({1: each, 3: each})


def test_all_matrices_are_updated_at_once() -> None:
    update = update_of(muon(Net()))
    assert StepPlan.of(bsp(), update, by_torch=True).sharding == "rows"
    assert not StepPlan.of(bsp(), update, by_torch=True).update_per_bucket
    assert StepPlan.of(bsp(), update).update_per_bucket


@pytest.mark.parametrize("period", [1, 2, 3])
def test_the_matrices_have_the_period_that_was_given(period: int) -> None:
    net = Net()
    known = periods(muon(net, period=period))
    assert [known.get(p) for p in net.parameters() if p.dim() == 2] == [period] * (len(SHAPES) + 1)


def test_a_period_is_a_number_of_steps() -> None:
    with pytest.raises(hpcsgd.UserError, match=r"muon: period = 0: expected a number of steps ≥ 1"):
        muon(Net(), period=0)


@pytest.mark.ranks(2)
def test_models_that_are_not_sharded_ignore_it(run) -> None:
    def of_rank(world: Communicator) -> bool:
        ends = [final(trained(world, 1, bsp(), 3, sharded=False, period=p)) for p in (1, 2)]
        return torch.equal(*ends)

    assert all(run(2, of_rank))


@pytest.mark.processes
@pytest.mark.ranks(4)
def test_a_rank_holds_its_rows_only(run) -> None:
    def held(world: Communicator) -> tuple[int, int]:
        *_, (net, optimizer) = trained(world, 1, bsp(), 1)
        state = sum(x.numel() for x in optimizer.local.tensors()[MOMENTUM])
        return state, sum(local(p).numel() for p in net.parameters() if p.dim() == 2)

    for state, rows in run(4, held):
        assert state == rows
