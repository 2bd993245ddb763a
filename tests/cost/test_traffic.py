"""The bytes that `hpcsgd.cost` predicts equal those counted, for every method on several shapes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import Topology, form
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.cost.collectives import sent
from hpcsgd.cost.traffic import of_step, ops_of_sync
from hpcsgd.engine.in_parts import is_tensorwise, seen_whole
from hpcsgd.engine.plan import StepPlan, Update
from hpcsgd.errors import UserError
from hpcsgd.methods import METHODS, Method, bsp, des_loc, hierarchical, selsync, sgp, streaming, switch
from hpcsgd.parts.grad_reduces import Plain, Quantized, ReduceScatter, Sparse, WithAllgather, per_worker
from hpcsgd.parts.grad_reduces.comm_ops import of_union
from hpcsgd.parts.quantizers import int8
from hpcsgd.parts.sparsifiers import CLTk, Deft, ExDyna, HardThreshold, MiCRO, TopK
from hpcsgd.parts.sparsifiers.base import Expected
from hpcsgd.train.training_profile import state_of
from methods.table import EXCEPTIONS, REFERENCES
from methods.test_unused_parts import Branches
from references import model, one_step
from shapes import some

STEPS = 12
"""A multiple of all periods of graphs and intervals in this file."""
BUCKET_BYTES = 200.0
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 2)]
ENTRIES = {**REFERENCES, **EXCEPTIONS}
IN_TURN = {label for label, entry in ENTRIES.items() if entry.method in ("switch", "pier", "post_local")}
"""Methods made of two, of which each has a test of its own."""
BY_NORMS = {"hierarchical with DEFT", "sparseloco over positions"}
"""Methods whose k and whose index codes depend on the gradients."""
SETTLING = {"hierarchical with ExDyna"}
"""Methods whose k is the planned one only after their threshold has settled; another test counts each k."""

Make = Callable[[Sequence[nn.Parameter]], optim.Optimizer]


def at_rest(params: Sequence[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(params, lr=0.0)


def joined(params: Sequence[nn.Parameter]) -> optim.Optimizer:
    """Return an optimizer of three kinds, two of which have state of the same name."""
    matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return hpcsgd.ChainedOptimizer(
        optim.Muon(matrices, lr=0.0),
        optim.AdamW(rest[1:], lr=0.0),
        optim.SGD(rest[:1], lr=0.0, momentum=0.9),
    )


WITH_OPTIMIZER_STATE: Mapping[str, Make] = {
    "momentum": lambda params: optim.SGD(params, lr=0.0, momentum=0.9),
    "AdamW": lambda params: optim.AdamW(params, lr=0.0),
    "joined": joined,
}


def made(label: str) -> Method:
    """Return a method of which STEPS is a multiple of all periods."""
    entry = ENTRIES[label]
    arguments = dict(entry.arguments())
    if entry.method == "adacomm":
        arguments = {"initial_sync_every": 1, "adapt_every": 2}
    if entry.method == "fedavg":
        arguments |= {"per_epoch": 1, "steps_per_epoch": 4}
    return METHODS[entry.method](**arguments)


class Narrow(nn.Module):
    """A model with 16-bit parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model().bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.bfloat16()).float()


MODELS: dict[str, Callable[[], nn.Module]] = {"16 bit": Narrow, "unused parameters": Branches}


def counted(
    world: Communicator,
    P: int,
    new: Callable[[], Method],
    make: Make = at_rest,
    form: Callable[..., Topology] = form,
    model: Callable[[], nn.Module] = model,
) -> dict[str, float]:
    """Return the bytes per step by phase, and the share of steps that synchronized, if it is known."""
    topology, net = form(world, P), model()
    optimizer = hpcsgd.DistributedOptimizer(
        make(list(net.parameters())), net, topology, new(), bucket_cap_mb=BUCKET_BYTES / 1e6
    )
    one_step(net, optimizer, topology, 0)  # make what is sent only once
    optimizer.state_dict()  # complete before the count begins
    before, met = world.stats.totals(), 0.0
    world.barrier()  # otherwise a request may be answered before this rank has begun to count
    for t in range(1, STEPS + 1):
        one_step(net, optimizer, topology, t)
        met += optimizer.metrics.get("synced", 0.0)
    optimizer.method.state_dict()  # waits for pending communication
    grown = world.stats.since(before)
    by_phase = {name: total.bytes / STEPS for name, total in grown.items() if name != "other"}
    return {name: nbytes for name, nbytes in by_phase.items() if nbytes} | {"synced": met / STEPS}


def predicted(
    P: int,
    K: int,
    method: Method,
    sync_rate: float,
    model: Callable[[], nn.Module] = model,
    make: Make = at_rest,
) -> dict[str, float]:
    net = model()
    inner = make(list(net.parameters()))
    whole = seen_whole(inner) if K > 1 and is_tensorwise(inner) else frozenset[nn.Parameter]()
    m = ModelLayout.of(net.named_parameters(), P, K, BUCKET_BYTES, *state_of(inner), whole=whole)
    return by_phase(StepPlan.of(method), m, sync_rate)


def by_phase(plan: StepPlan, m: ModelLayout, sync_rate: float | None = None) -> dict[str, float]:
    total = defaultdict[str, float](float)
    for x in of_step(plan, m, sync_rate=sync_rate):
        if x.over != "replica_groups":
            total[x.phase] += (
                x.times * x.sender_fraction * float(sent(x.operation, x.nbytes, m.ranks(x.over)))
            )
    return {name: nbytes for name, nbytes in total.items() if nbytes}


def on_the_mean(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for rank in ranks for name in rank}
    return {name: sum(rank.get(name, 0.0) for rank in ranks) / len(ranks) for name in names}


@pytest.mark.threads(unless={"P": 2, "K": 2, "label": {"async_sgd", "hierarchical", "sgp"}})
@pytest.mark.parametrize(("P", "K"), some(SHAPES, {(1, 2), (2, 2), (3, 1)}))
@pytest.mark.parametrize("label", sorted(ENTRIES.keys() - IN_TURN - SETTLING))
def test_bytes_of_every_method_are_those_that_the_stats_count(run, label: str, P: int, K: int) -> None:
    entry = ENTRIES[label]
    found = on_the_mean(run(P * K, counted, P, partial(made, label), at_rest, entry.form))
    expected = predicted(P, K, made(label), found.pop("synced"))
    if made(label).averager.traits.elastic:
        found.pop("model_average", None)  # the bytes between groups are not counted
    assert found == pytest.approx(expected, rel=0.35 if label in BY_NORMS else 1e-12)


@pytest.mark.slow
@pytest.mark.threads
@pytest.mark.parametrize(("P", "K"), [(3, 2)])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("label", sorted(ENTRIES.keys() - IN_TURN - BY_NORMS - SETTLING))
def test_bytes_with_awkward_models(run, label: str, kind: str, P: int, K: int) -> None:
    entry = ENTRIES[label]
    found = on_the_mean(run(P * K, counted, P, partial(made, label), at_rest, entry.form, MODELS[kind]))
    expected = predicted(P, K, made(label), found.pop("synced"), MODELS[kind])
    if made(label).averager.traits.elastic:
        found.pop("model_average", None)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize(
    "grad_reduce",
    [
        lambda: Sparse(Deft(0.2, exact=True), indices=Plain()),
        lambda: Sparse(CLTk(0.2), indices=Plain()),
        lambda: Sparse(TopK(0.2), combine=per_worker, indices=Plain()),
    ],
    ids=["DEFT", "CLT-k", "own Top-k"],
)
def test_bytes_of_sparse_gradient_reductions(run, grad_reduce: Callable[[], Sparse], P: int, K: int) -> None:
    found = on_the_mean(run(P * K, counted, P, lambda: bsp(grad_reduce())))
    del found["synced"]
    expected = predicted(P, K, bsp(grad_reduce()), 0.0)
    k = round(0.2 * ModelLayout.of(model().named_parameters(), P, K, BUCKET_BYTES).M)
    assert found.keys() == expected.keys()
    for phase, nbytes in expected.items():
        assert found[phase] == pytest.approx(nbytes, rel=0.5 / k)  # k is a whole number


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("sparsifier", [MiCRO, ExDyna])
def test_bytes_by_how_many_exceed_a_threshold(
    run, sparsifier: Callable[[float], MiCRO | ExDyna], P: int, K: int
) -> None:
    """The bytes are those of the plan's operations with each step's k, even if workers' counts differ."""
    n, M = P * K, sum(p.numel() for p in model().parameters())

    def steps(world: Communicator) -> list[tuple[float, dict[str, int]]]:
        topology, net, found = form(world, P), model(), []
        method = bsp(Sparse(sparsifier(0.2), indices=Plain()))
        optimizer = hpcsgd.DistributedOptimizer(at_rest(list(net.parameters())), net, topology, method)
        for t in range(STEPS):
            before = world.stats.totals()
            one_step(net, optimizer, topology, t)
            grown = {name: total.bytes for name, total in world.stats.since(before).items()}
            found.append((optimizer.metrics["density"] * M, grown))
        return found

    for t, ranks in enumerate(zip(*run(n, steps), strict=True)):
        k = ranks[0][0]
        expected = defaultdict[str, float](float)
        if t == 0:  # worker 0 sends λ to all others
            expected["allocation"] = float(sent("bcast", 8, n))
        for x in of_union(Expected(M, k / n, k, M / n), Plain(), "world", n, 8):
            expected[x.phase] += float(sent(x.operation, x.nbytes, n))
        found = on_the_mean([grown for _, grown in ranks])
        assert {phase: found.get(phase, 0.0) for phase in expected} == pytest.approx(expected, rel=1e-12)
        assert ("allocation" in found) == (t == 0)


def test_bytes_per_index_of_gaps() -> None:
    torch.manual_seed(0)
    for density in (0.3, 0.01, 0.001):
        indices = torch.nonzero(torch.rand(400_000) < density).view(-1)
        from hpcsgd.parts.grad_reduces import Gaps

        found = Gaps().encode(indices, 400_000).numel() / indices.numel()
        assert Gaps().bytes_per_index(density) == pytest.approx(found, rel=0.03)


@pytest.mark.threads(unless={"P": 2, "K": 2, "optimizer": "AdamW"})
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize(
    "new", [lambda: hierarchical(3, optimizer_state=hpcsgd.AverageState), lambda: des_loc(4, 3, 6)]
)
@pytest.mark.parametrize("optimizer", WITH_OPTIMIZER_STATE)
def test_bytes_of_averaged_optimizer_state(
    run, optimizer: str, new: Callable[[], Method], P: int, K: int
) -> None:
    """With chained optimizers each state tensor counts for the parameters that have it."""
    make = WITH_OPTIMIZER_STATE[optimizer]
    found = on_the_mean(run(P * K, counted, P, new, make))
    del found["synced"]
    assert found == pytest.approx(predicted(P, K, new(), 0.0, make=make), rel=1e-12)
    assert found["state_average"] > 0


def test_what_each_parameter_has() -> None:
    """The state is known from the optimizer's kind, its group and the dimensions of its parameters."""
    matrix, bias, plain = (nn.Parameter(torch.zeros(shape)) for shape in ((3, 2), (3,), (4,)))
    sgd = optim.SGD([{"params": [plain]}, {"params": [bias], "momentum": 0.9}], lr=0.1)
    assert state_of(sgd) == ({"momentum_buffer": {bias}}, {})
    adam = optim.Adam([bias, plain], lr=0.1, amsgrad=True)
    both = {bias, plain}
    moments = {"exp_avg": both, "exp_avg_sq": both, "max_exp_avg_sq": both, "momentum_buffer": {matrix}}
    assert state_of(hpcsgd.ChainedOptimizer(optim.Muon([matrix], lr=0.1), adam)) == (moments, {"step": both})
    rows = optim.Adafactor([matrix, bias], lr=0.1)
    assert state_of(rows) == ({"variance": {bias}}, {"step": {matrix, bias}})


class Unknown(optim.Adafactor):
    """An optimizer that might use more than one tensor at once."""


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("kind", [Unknown, optim.Adafactor])
@pytest.mark.parametrize("new", [lambda: hierarchical(3), lambda: streaming(hierarchical(4), 2, 0)])
def test_optimizers_cost_what_they_look_at(
    run, kind: Callable[..., optim.Optimizer], new: Callable[[], Method], P: int, K: int
) -> None:
    """Unknown kinds need an allgather. Optimizers that use each tensor separately need padding."""

    def bytes_of(world: Communicator) -> dict[str, float]:
        return counted(world, P, new, lambda params: kind(params, lr=0.0))

    found = on_the_mean(run(P * K, bytes_of))
    del found["synced"]
    net, divided = model(), kind is not Unknown
    whole = set(net.parameters()) if divided else set[nn.Parameter]()
    m = ModelLayout.of(net.named_parameters(), P, K, BUCKET_BYTES, whole=whole)
    total = defaultdict[str, float](float)
    for x in of_step(StepPlan.of(new(), Update() if divided else Update("model", by_itself=False)), m):
        total[x.phase] += x.times * float(sent(x.operation, x.nbytes, m.ranks(x.over)))
    assert found == pytest.approx({k: v for k, v in total.items() if v}, rel=1e-12)


PAIRS: dict[str, tuple[Callable[[], Method], Callable[[], Method]]] = {
    "bsp, hierarchical": (bsp, lambda: hierarchical(3)),
    "streamed, packed": (
        lambda: streaming(hierarchical(4), 2, 0),
        lambda: hierarchical(3, Quantized(parameters=int8())),
    ),
    "sgp, bsp": (sgp, bsp),
}


@pytest.mark.threads(unless={"P": 2, "K": 2, "pair": {"bsp, hierarchical"}})
@pytest.mark.parametrize(("P", "K"), some([(1, 2), (2, 2), (3, 1)], {(2, 2)}))
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("pair", PAIRS)
def test_bytes_of_a_switch_are_those_of_the_stage(run, pair: str, turn: int, P: int, K: int) -> None:
    """The first step, in which the second method begins, is not counted."""
    at = (100, 1)[turn]
    new = lambda: switch(*(method() for method in PAIRS[pair]), at=at)  # noqa: E731
    found = on_the_mean(run(P * K, counted, P, new))
    del found["synced"]
    m = ModelLayout.of(model().named_parameters(), P, K, BUCKET_BYTES)
    assert found == pytest.approx(by_phase(StepPlan.of(new()).sequence[turn][1], m), rel=1e-12)


def test_a_step_of_a_stage_sends_what_a_step_of_the_method_sends() -> None:
    m = ModelLayout.of(model().named_parameters(), 4, 2, BUCKET_BYTES)
    alone = [of_step(StepPlan.of(method), m) for method in (bsp(), hierarchical(3))]
    plan = StepPlan.of(switch(bsp(), hierarchical(3), at=5))
    assert [of_step(stage, m) for _, stage in plan.sequence] == alone
    for asked in (of_step, ops_of_sync):  # a plan of two stages has no operations as a whole
        with pytest.raises(AssertionError, match="stage"):
            asked(plan, m)


def test_what_cannot_be_predicted_is_reported() -> None:
    m = ModelLayout.of(model().named_parameters(), 2, 2, BUCKET_BYTES)
    with pytest.raises(UserError, match="how often the groups average depends on the gradients"):
        of_step(StepPlan.of(selsync(0.3)), m)
    with pytest.raises(UserError, match="HardThreshold: how many elements it selects depends on"):
        of_step(StepPlan.of(bsp(Sparse(HardThreshold(0.1)))), m)


def test_who_reduces_whole_vectors_and_averages_shards_gathers_once_more() -> None:
    """Like the engine, it averages shards although each rank has all of w, and an allgather follows."""
    m = ModelLayout.of(model().named_parameters(), 2, 2, BUCKET_BYTES)
    found = of_step(StepPlan.of(hierarchical(3, WithAllgather(ReduceScatter()))), m)
    after = [x for x in found if x.phase == "param_gather"]
    assert after == [
        CommOp("allgather", "intra_group", b.nbytes, "param_gather", 1 / 3, stage="model_average")
        for b in m.buckets
    ]


@pytest.mark.ranks(3)
def test_sizes_are_those_of_the_engine(run) -> None:
    def laid_out(world: Communicator) -> list[tuple[int, int]]:
        topology, net = form(world, groups=1), model()
        made = hpcsgd.DistributedOptimizer(
            at_rest(list(net.parameters())), net, topology, bsp(), bucket_cap_mb=BUCKET_BYTES / 1e6
        )
        return [(b.slots[-1].stop, b.size) for b in made.buckets]

    m = ModelLayout.of(model().named_parameters(), 1, 3, BUCKET_BYTES)
    assert run(3, laid_out)[0] == [(b.used, b.padded) for b in m.buckets]
    assert sum(m.layers) == m.M == sum(p.numel() for p in model().parameters())
    assert math.isclose(m.message_buffer(2) - 8, (m.message_buffer() - 8) / 2, rel_tol=0.1)


@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2), (2, 1)])
def test_buffers_that_groups_share_are_counted(run, P: int, K: int) -> None:
    def counted(world: Communicator) -> float:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), 0.1), net, form(world, P), bsp(), broadcast_buffers=True
        )
        before = _counted(world)
        net(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        return _counted(world) - before

    def _counted(world: Communicator) -> float:
        totals = world.stats.totals()
        return totals["buffers"].bytes if "buffers" in totals else 0.0

    found = run(P * K, counted)
    buffers = sum(x.nbytes for x in nn.BatchNorm1d(4).buffers())
    m = ModelLayout.of(list(nn.Linear(3, 4).named_parameters()), P, K, BUCKET_BYTES)
    predicted = [x for x in of_step(StepPlan.of(bsp()), m, broadcast=buffers) if x.phase == "buffers"]
    assert sum(found) / len(found) == pytest.approx(sum(sent(x.operation, x.nbytes, K) for x in predicted))
    assert not [x for x in of_step(StepPlan.of(bsp()), m) if x.phase == "buffers"]
