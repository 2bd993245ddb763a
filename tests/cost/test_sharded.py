"""Costs predicted for FSDP models, compared with the communication statistics, torch's calls and tensors."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import hpcsgd
from cost.test_memory import apart
from hpcsgd.comm import Communicator
from hpcsgd.core.replica_groups import Absent, Contribution
from hpcsgd.core.topology import Topology, form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.collectives import sent
from hpcsgd.cost.memory import kept, one_block
from hpcsgd.cost.overlap import among_blocks
from hpcsgd.cost.traffic import BY_TORCH, by_muon, by_torch, of_step
from hpcsgd.elastic.contribution import Facts
from hpcsgd.engine.muon_by_rows import periods
from hpcsgd.engine.plan import StepPlan, Update
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    Method,
    allreduce_local_sgd,
    bsp,
    delayed,
    diloco,
    ensemble_sync,
    hierarchical,
    selsync,
    sgp,
    streaming,
)
from hpcsgd.models.sharded import fsdp_units, fully_shard
from hpcsgd.parts.averagers import NESTEROV, PseudoGradientPenalty, RadialDirectional
from hpcsgd.parts.grad_reduces import Sparse
from hpcsgd.parts.sparsifiers import TopK
from hpcsgd.train.training_profile import state_of
from references import batch, loss

BUCKET_BYTES = 600.0
STEPS = 12
"""A multiple of all periods of graphs and intervals in this file."""
EVERY = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 11), nn.Linear(11, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """A model with rows that no K divides, with fewer rows than ranks, and with frozen tensors."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.fixed, self.last = nn.Linear(width, width), nn.Linear(width, 3)
        self.fixed.requires_grad_(False)
        self.blocks[1].up.bias.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.fixed(x))


METHODS: dict[str, Callable[[], Method]] = {
    "bsp": bsp,
    "hierarchical": lambda: hierarchical(EVERY),
    "moments": lambda: hierarchical(EVERY, optimizer_state=hpcsgd.AverageState),
    "allreduce_local_sgd": lambda: allreduce_local_sgd(EVERY),
    "diloco": lambda: diloco(EVERY),
    "selsync": lambda: selsync(0.0),
    "sgp": sgp,
    "streaming": lambda: streaming(diloco(EVERY), 3, 1),
}
OF_JOBS: dict[str, Callable[[], Method]] = {
    "ensemble_sync": lambda: ensemble_sync(EVERY),
    "guarded": lambda: ensemble_sync(EVERY, guard=PseudoGradientPenalty()),
    "outer": lambda: ensemble_sync(EVERY, outer=NESTEROV, tokens_per_step=8),
    "guarded, outer": lambda: ensemble_sync(EVERY, outer=NESTEROV, guard=PseudoGradientPenalty()),
    "radial-directional": lambda: ensemble_sync(EVERY, outer=NESTEROV, merge=RadialDirectional()),
    "fragments": lambda: ensemble_sync(EVERY, outer=NESTEROV, num_fragments=3, tokens_per_step=8),
    "radial-directional fragments": lambda: ensemble_sync(
        EVERY, outer=NESTEROV, num_fragments=3, merge=RadialDirectional()
    ),
}
"""Methods whose groups are jobs of their own."""
ALWAYS = 1.0
"""The sync rate of selsync with a threshold of 0."""


class Alone(Absent):
    """Replica groups of which all others have died."""

    def mean(
        self, w: Sequence[Tensor], t: int, *, alike: bool = True, contribution: Contribution | None = None
    ) -> None:
        if contribution is not None:
            contribution(Facts({0: contribution.norms}, {0: contribution.weights}, t, contribution.part))


def placed(world: Communicator, P: int, method: str) -> Topology:
    topology = form(world, P)
    return replace(topology, replica_groups=Alone()) if method in OF_JOBS else topology


def sizes(net: nn.Module, P: int, K: int, inner: optim.Optimizer | None = None) -> ModelLayout:
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    having = ({}, {}) if inner is None else state_of(inner)
    return ModelLayout.of(
        named, P, K, BUCKET_BYTES, *having, units=[params for _, params in fsdp_units(net, ["blocks.*"])],
        periods={} if inner is None else periods(inner),
    )  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """The communication of one rank."""

    by_phase: dict[str, float]
    """Bytes per step, by phase."""
    torch: Counter[tuple[str, int]]
    """The number of calls in a step, by collective and by bytes of the whole vector."""
    distances: list[float]


@contextlib.contextmanager
def torch_counted() -> Iterator[Counter[tuple[str, int]]]:
    """Count the collectives of `fully_shard`, with the bytes of the vector of all ranks together."""
    found: Counter[tuple[str, int]] = Counter()
    names = {"all_gather_single": (0, "output_tensor"), "reduce_scatter_single": (1, "input")}
    before = {name: getattr(dist, name) for name in names}

    def counting(name: str, place: int, word: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            whole = kwargs[word] if word in kwargs else args[place]
            found[name, whole.nbytes] += 1
            return before[name](*args, **kwargs)

        return call

    for name, (place, word) in names.items():
        setattr(dist, name, counting(name, place, word))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


MakeOptimizer = Callable[[nn.Module], optim.Optimizer]


def adamw(net: nn.Module) -> optim.Optimizer:
    return optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)


def trained(
    topology: Topology, method: Method, *, sharded: bool = True, make: MakeOptimizer = adamw
) -> Iterator[hpcsgd.DistributedOptimizer]:
    """Yield the optimizer after each step."""
    torch.manual_seed(0)
    net = Net()
    if sharded:
        fully_shard(net, topology, ["blocks.*"])
    optimizer = hpcsgd.DistributedOptimizer(
        make(net), net, topology, method, bucket_cap_mb=BUCKET_BYTES / 1e6
    )
    for t in range(STEPS + 1):
        optimizer.zero_grad()
        value = loss(net, *batch(t, topology.rank, torch.float32))
        value.backward()
        optimizer.step(loss=value.detach())
        yield optimizer


def seen(world: Communicator, P: int, method: str) -> Seen:
    steps = trained(placed(world, P, method), {**METHODS, **OF_JOBS}[method]())
    next(steps).state_dict()  # exclude what is sent only once
    world.barrier()
    before, distances = world.stats.totals(), []
    with torch_counted() as found:
        for optimizer in steps:
            distances.append(optimizer.metrics.get("distance", 0.0))
        optimizer.method.state_dict()  # waits for pending communication
    grown = {name: total.bytes / STEPS for name, total in world.stats.since(before).items()}
    by_phase = {name: nbytes for name, nbytes in grown.items() if nbytes and name != "other"}
    each = Counter({call: number // STEPS for call, number in found.items()})
    assert all(number % STEPS == 0 for number in found.values())
    return Seen(by_phase, each, distances)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "P", "K"),
    [
        *(
            pytest.param(m, P, K, marks=[] if (P, K) == (2, 2) else [pytest.mark.long])
            for m in METHODS
            for P, K in [(1, 2), (2, 1), (2, 2), (1, 4), (2, 4), (4, 2)]
        ),
        *((m, 1, 2) for m in OF_JOBS),
    ],
)
def test_bytes_are_those_of_the_stats_and_of_torch(run, method: str, P: int, K: int) -> None:
    ranks = run(P * K, seen, P, method)
    net = Net()
    m = sizes(net, P, K, optim.AdamW([p for p in net.parameters() if p.requires_grad]))
    expected, torchs = defaultdict[str, float](float), Counter[tuple[str, int]]()
    names = {"allgather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
    made = {**METHODS, **OF_JOBS}[method]()
    for x in of_step(StepPlan.of(made, by_torch=True), m, sync_rate=ALWAYS):
        if x.phase == BY_TORCH:
            torchs[names[x.operation], int(x.nbytes)] += 1
        elif x.over != "replica_groups":  # the stats do not count those
            expected[x.phase] += (
                x.times * x.sender_fraction * float(sent(x.operation, x.nbytes, m.ranks(x.over)))
            )
    phases = {name for rank in ranks for name in rank.by_phase}
    on_the_mean = {name: sum(rank.by_phase.get(name, 0.0) for rank in ranks) / len(ranks) for name in phases}
    assert on_the_mean == pytest.approx({k: v for k, v in expected.items() if v}, rel=1e-12)
    assert "grad_reduce" not in on_the_mean or method == "bsp"
    assert [rank.torch for rank in ranks] == [torchs] * len(ranks)


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["hierarchical", "allreduce_local_sgd"])
def test_the_distance_is_that_of_whole_models(run, method: str) -> None:
    """This holds even if an averager treats the rank's part as the whole w."""

    def distances(world: Communicator, sharded: bool) -> list[float]:
        steps = trained(form(world, 2), METHODS[method](), sharded=sharded)
        return [optimizer.metrics.get("distance", 0.0) for optimizer in steps]

    for mine, theirs in run(4, lambda world: (distances(world, True), distances(world, False))):
        assert any(mine)
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("period", [1, EVERY])
def test_bytes_of_muon_are_those_of_the_stats(run, groups: int, period: int) -> None:
    def muon(net: nn.Module) -> optim.Optimizer:
        return hpcsgd.muon(net, lr=0.01, period=period)

    def by_phase(world: Communicator) -> dict[str, float]:
        steps = trained(form(world, groups), hierarchical(EVERY), make=muon)
        next(steps)
        before = world.stats.totals()
        for _ in steps:
            pass
        return {name: total.bytes / STEPS for name, total in world.stats.since(before).items()}

    net = Net()
    inner = muon(net)
    m, plan = sizes(net, groups, 4 // groups, inner), StepPlan.of(hierarchical(EVERY), by_torch=True)
    ops = [x for x in of_step(plan, m) if x.phase == "muon"]
    expected = sum(x.times * float(sent(x.operation, x.nbytes, m.K)) for x in ops)
    assert expected > 0
    assert sum(rank["muon"] for rank in run(4, by_phase)) / 4 == pytest.approx(expected, rel=1e-12)


def test_muon_sends_nothing_without_other_ranks_or_sharding() -> None:
    net = Net()
    inner = hpcsgd.muon(net, lr=0.01)
    assert sizes(net, 4, 2, inner).orthogonalized
    assert not by_muon(sizes(net, 4, 1, inner))
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    assert not ModelLayout.of(named, 2, 2, BUCKET_BYTES, periods=periods(inner)).orthogonalized


@pytest.mark.parametrize(("ranks_per_host", "share"), [(4, 0.0), (2, 2 / 3), (1, 1.0)])
def test_rows_go_to_other_hosts(ranks_per_host: int, share: float) -> None:
    net = Net()
    m = replace(sizes(net, 1, 4, hpcsgd.muon(net, lr=0.01)), ranks_per_host=ranks_per_host)
    assert [x.off_host_fraction for x in by_muon(m)] == [pytest.approx(share)]


def test_a_large_group_takes_no_quadratic_time() -> None:
    net = Net()
    m = replace(sizes(net, 1, 4, hpcsgd.muon(net, lr=0.01)), K=10**6, ranks_per_host=10**5)
    assert [x.off_host_fraction for x in by_muon(m)] == [pytest.approx(0.9, rel=1e-5)]


def test_sizes_are_those_that_torch_pads_to() -> None:
    """Each parameter's rows are cut into shards, all as large as that of shard index 0."""
    net, K = Net(), 4
    trained = [p for p in net.parameters() if p.requires_grad]
    m = sizes(net, 2, K, optim.AdamW(trained))
    own = sum(math.ceil(len(p) / K) * (p.numel() // len(p)) for p in trained)
    assert m.sharded
    assert m.own_elements() == sum(m.here(b) for b in m.buckets) == 4 * own
    assert sum(p.numel() for p in trained) == m.M
    everything = set(range(len(m.layers)))
    assert sum(m.by_width(everything).values()) == m.M
    rows = [[len(p[j * -(-len(p) // K) : (j + 1) * -(-len(p) // K)]) for j in range(K)] for p in trained]
    assert m.rows_of(everything) == sum(n > 0 for of_one in rows for n in of_one) / K
    assert [unit.stays for unit in m.units] == [False, False, False, True]
    assert sum(unit.numel for unit in m.units) == sum(p.numel() for p in net.parameters())


def test_torch_gathers_blocks_twice_and_what_is_outside_once() -> None:
    m = sizes(Net(), 1, 2)
    found = [(x.stage, x.bucket) for x in by_torch(m)]
    forward = [("forward", i) for i in (3, 2, 1, 0)]
    backward = [(stage, i) for i in (0, 1, 2) for stage in ("backward", "reduce")]
    assert found == [*forward, *backward, ("reduce", 3)]
    assert by_torch(sizes(Net(), 4, 1)) == []


def test_a_pass_waits_for_what_its_neighbours_do_not_hide() -> None:
    assert among_blocks([2, 2, 2], [1, 1, 1], [0, 0, 0]) == 1 + 6
    assert among_blocks([2, 2, 2], [1, 3, 1], [0, 0, 0]) == 1 + 3 + 2 + 2
    assert among_blocks([2, 2, 2], [1, 1, 0], [1, 4, 1]) == 1 + 2 + 2 + 4 + 1


def test_what_cannot_be_sharded_is_said() -> None:
    m = sizes(Net(), 2, 2)
    with pytest.raises(UserError, match="Sparse: torch shards the parameters and reduces the gradients"):
        of_step(StepPlan.of(bsp(Sparse(TopK(0.1))), by_torch=True), m)
    with pytest.raises(UserError, match="the optimizer is not known to update every element by itself"):
        StepPlan.of(bsp(), Update("model", by_itself=False), by_torch=True)
    net = Net()
    net.blocks[2].up.weight = net.blocks[0].up.weight  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    with pytest.raises(UserError, match=r"units: blocks.0.up.weight is in two of them"):
        fsdp_units(net, ["blocks.*"])


HOLDING = {**METHODS, "delayed": lambda: delayed(hierarchical(EVERY), 2)}


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "method", ["bsp", "hierarchical", "allreduce_local_sgd", "diloco", "delayed", "streaming"]
)
def test_tensors_are_those_of_the_formula(run, method: str) -> None:
    """The formula's unit, which exists only during a pass, is not counted."""

    def living(world: Communicator) -> int:
        topology = form(world, 2)
        with apart() as found:
            net = fully_shard(
                nn.Sequential(nn.Linear(5, 97), nn.Tanh(), Wide(), Wide(), nn.Linear(97, 3)), topology
            )
            inner = optim.AdamW(net.parameters(), lr=0.01)
            optimizer = hpcsgd.DistributedOptimizer(
                inner, net, topology, HOLDING[method](), bucket_cap_mb=2e-3
            )
            for t in range(2 * EVERY):
                optimizer.zero_grad()
                value = loss(net, *batch(t, topology.rank, torch.float32))
                value.backward()
                optimizer.step(loss=value.detach())
            optimizer.method.state_dict()
            return found()

    net = nn.Sequential(nn.Linear(5, 97), nn.Tanh(), Wide(), Wide(), nn.Linear(97, 3))
    m = ModelLayout.of(
        net.named_parameters(), 2, 2, 2000.0, units=[params for _, params in fsdp_units(net, None)]
    )
    assert one_block(m) == 4 * (2 * 49 * (97 + 1) + 2 * 49 * (5 + 1) + 2 * 2 * (97 + 1))
    expected = kept(StepPlan.of(HOLDING[method](), by_torch=True), m, 2) - one_block(m)
    found = run(4, living)
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.03)  # fragments differ by shard


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(97, 97), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)
