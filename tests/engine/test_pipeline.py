"""Overlapping phases of a step give the bits of sequential ones, and begin no later than they have to."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import hpcsgd
from hpcsgd.comm import Communicator, Work, threads
from hpcsgd.comm.threads import ThreadBackend
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import ReduceContext
from hpcsgd.core.topology import Topology, form
from hpcsgd.engine import optimizer
from hpcsgd.engine import param_gather as gather_module
from hpcsgd.engine.param_gather import ParamGather
from hpcsgd.engine.plan import StepPlan
from hpcsgd.engine.sharding import ShardedOptimizer
from hpcsgd.methods import Method, bsp, delayed, diloco, hierarchical, post_local, selsync, streaming, switch
from hpcsgd.methods.hierarchical import allreduce_local_sgd
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers import Mean, WithDistance
from hpcsgd.parts.grad_reduces import AllToAll, ReduceScatter, Sparse, WithAllgather
from hpcsgd.parts.schedules import Every, never
from hpcsgd.parts.sparsifiers import TopK
from methods.table import REFERENCES, Case
from references import batch, loss, vector
from references import model as make_model
from shapes import some

STEPS = 4
PATIENCE = 60.0  # seconds, because the machine may be busy
LAYER, FEW, WHOLE = 1e-6, 1e-4, 1.0
"""Megabytes per bucket: for one bucket per parameter, for three buckets, and for one."""
OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "momentum": lambda net: optim.SGD(groups_of(net), lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda net: optim.AdamW(groups_of(net), lr=0.01, weight_decay=0.1, amsgrad=True),
}
METHODS: dict[str, Callable[[], Method]] = {
    "hierarchical": lambda: hierarchical(sync_every=2),
    "moments averaged": lambda: hierarchical(sync_every=2, optimizer_state=hpcsgd.AverageState),
    "moments reset": lambda: hierarchical(
        sync_every=2, optimizer_state=hpcsgd.ResetState, grad_reduce=ReduceScatter()
    ),
    "bsp": bsp,
    "bsp with meetings": lambda: Method(bsp().grad_reduce, Every(2), WithDistance(Mean())),
    "diloco": lambda: diloco(sync_every=2),
    "selsync": lambda: selsync(delta=0.3),
    "allreduce_local_sgd": lambda: allreduce_local_sgd(sync_every=2),
    "sparse": lambda: hierarchical(sync_every=2, grad_reduce=Sparse(TopK(0.2))),
    "post_local": lambda: post_local(sync_every=2),
    "delayed": lambda: delayed(hierarchical(sync_every=2), 1),
    "delayed, one after the other": lambda: delayed(hierarchical(sync_every=2), 2),
    "delayed selsync": lambda: delayed(selsync(delta=0.3), 1),
    "delayed by a narrow wire": lambda: delayed(hierarchical(sync_every=2, quantize=quantizers.int8()), 1),
    "delayed, gradients across": lambda: delayed(
        Method(bsp().grad_reduce, Every(2), WithDistance(Mean())), 1
    ),
    "delayed, then bsp": lambda: switch(delayed(hierarchical(sync_every=2), 2), bsp(), at=3),
    "streaming": lambda: streaming(diloco(sync_every=2), 2, 1),
    "streamed without delay": lambda: streaming(hierarchical(sync_every=2), 2, 0),
}


SETTINGS = [
    pytest.param(*setting, marks=[] if setting in [(LAYER, 1, None), (FEW, 4, 0.5)] else [pytest.mark.long])
    for setting in itertools.product((LAYER, FEW, WHOLE), (1, 4), (None, 0.5))
]


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [{"params": params[1::2], "lr": 0.02}, {"params": params[0::2]}]


def trained(
    world: Communicator,
    P: int,
    method: Callable[[], Method],
    inner: str,
    bucket_cap_mb: float,
    passes: int = 1,
    clip: float | None = None,
    dtype: torch.dtype = torch.float64,
    prefetch: bool = False,
) -> list[Tensor]:
    """Train, and return the parameters and the model distance after each step."""
    net = make_model(world.rank, dtype)
    master = torch.float32 if dtype == torch.bfloat16 else None
    topology = form(world, P)
    made = hpcsgd.DistributedOptimizer(
        OPTIMIZERS[inner](net), net, topology, method(),
        bucket_cap_mb=bucket_cap_mb, gradient_accumulation_steps=passes, master_dtype=master,
        overlap_param_gather=prefetch,
    )  # fmt: skip
    history = []
    for t in range(STEPS):
        made.zero_grad()
        for i in range(passes):
            loss(net, *batch(passes * t + i, world.rank, dtype)).backward()
        if clip is not None:
            made.clip_grad_norm_(clip)
        made.step()
        history += [vector(net), torch.tensor(made.metrics.get("distance", -1.0))]
    return history


late = functools.partial(trained, prefetch=True)


@contextlib.contextmanager
def in_the_plain_order() -> Iterator[None]:
    """Run all gradients, the whole update, the synchronization and all gathers in sequence, on one thread."""

    def synchronized(s: Any, how: Any, param_gather: ParamGather, updated: Any, **given: Any) -> None:
        updated = list(updated)
        nothing_early = mock.patch.object(param_gather, "shards_are_final", return_value=None)
        with nothing_early:
            gather_module.synchronize_models(s, how, param_gather, updated, **given)

    made = StepPlan.of

    def plain(*args: Any, **kwargs: Any) -> StepPlan:
        return replace(made(*args, **kwargs), update_per_bucket=False, decided_before_update=False)

    with (
        mock.patch.object(StepPlan, "of", plain),
        mock.patch.object(optimizer, "synchronize_models", synchronized),
        mock.patch.object(Communicator, "with_own_thread", lambda this: this),
    ):
        yield


@contextlib.contextmanager
def in_many_parts() -> Iterator[None]:
    """Pretend that no bucket has arrived when the one before it has."""
    with mock.patch.object(Work, "done", return_value=False):
        yield


def same_bits(here: list[list[Tensor]], there: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(mine, theirs)
        for ranks in zip(here, there, strict=True)
        for mine, theirs in zip(*ranks, strict=True)
    )


@pytest.mark.threads(unless={"P": 2, "K": 2, "inner": "momentum", "method": {"bsp", "hierarchical"}})
@pytest.mark.parametrize(("P", "K"), some([(1, 4), (2, 2), (4, 1), (2, 4)], {(1, 4), (2, 2), (4, 1)}))
@pytest.mark.parametrize(("bucket_cap_mb", "passes", "clip"), SETTINGS)
@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize("method", ["hierarchical", "bsp"])
def test_the_bits_are_those_of_the_plain_order(
    run, method: str, inner: str, P: int, K: int, bucket_cap_mb: float, passes: int, clip: float | None
) -> None:
    """The bits are the same for all bucket sizes, numbers of backward passes, and kinds of clipping."""
    arguments = (P, METHODS[method], inner, bucket_cap_mb, passes, clip)
    with in_the_plain_order():
        plain = run(P * K, trained, *arguments)
    with in_many_parts():
        assert same_bits(run(P * K, trained, *arguments), plain)
    assert same_bits(run(P * K, late, *arguments), plain)
    assert same_bits(run(P * K, trained, *arguments), plain)


@pytest.mark.slow
@pytest.mark.threads(
    unless={"P": 2, "method": {"bsp", "delayed", "diloco", "hierarchical", "selsync", "sparse", "streaming"}}
)
@pytest.mark.parametrize(
    ("P", "K", "dtype"), [(2, 2, torch.float64), (3, 1, torch.float64), (2, 3, torch.bfloat16)]
)
@pytest.mark.parametrize("method", METHODS)
def test_so_are_those_of_each_kind_of_method(run, method: str, dtype: torch.dtype, P: int, K: int) -> None:
    """The bits are the same for each kind of method, also with master weights."""
    arguments = (P, METHODS[method], "AdamW", LAYER, 1, None, dtype)
    with in_the_plain_order():
        plain = run(P * K, trained, *arguments)
    with in_many_parts():
        assert same_bits(run(P * K, trained, *arguments), plain)
    assert same_bits(run(P * K, late, *arguments), plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("label", [label for label, case in REFERENCES.items() if case.same_bits])
def test_so_are_those_of_all_methods_of_the_table(run, label: str) -> None:
    case: Case = REFERENCES[label]

    def history(world: Communicator) -> list[Tensor]:
        topology, net = case.form(world, 2), make_model()
        made = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1), net, topology, case.new(), bucket_cap_mb=LAYER
        )
        found = []
        for t in range(STEPS):
            made.zero_grad()
            value = loss(net, *batch(t, world.rank))
            value.backward()
            made.step(loss=value)
            found.append(vector(net))
        return found

    with in_the_plain_order():
        plain = run(4, history)
    with in_many_parts():
        assert same_bits(run(4, history), plain)


def one_step(world: Communicator, P: int, method: Method) -> None:
    net = make_model()
    inner = optim.SGD(net.parameters(), lr=0.1)
    made = hpcsgd.DistributedOptimizer(inner, net, form(world, P), method, bucket_cap_mb=FEW)
    loss(net, *batch(0, world.rank)).backward()
    made.step()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it would have waited for ever"
        time.sleep(0.001)


class Until:
    """An `AllToAll` whose later buckets wait until `become` is true of the first bucket's shard."""

    traits = AllToAll.traits

    def __init__(self, become: Callable[[Tensor, Tensor], bool]) -> None:
        self._become = become
        self._before: Tensor | None = None

    def idle(self, topology: Topology) -> bool:
        return False

    def __call__(self, d: ReduceContext, b: Bucket) -> None:
        own = d.buckets[0].param_shard
        if self._before is None:
            self._before = own.clone()
        else:
            before = self._before
            until(lambda: self._become(own, before))
        AllToAll()(d, b)


def has_changed(own: Tensor, before: Tensor) -> bool:
    return not torch.equal(own, before)


def test_a_bucket_is_updated_while_the_next_one_is_on_its_way() -> None:
    def train(world: Communicator) -> None:
        one_step(world, 1, Method(Until(has_changed), never, Mean()))

    threads.run(2, train, timeout=PATIENCE)


def test_a_bucket_is_averaged_while_the_next_one_is_in_its_group() -> None:
    averaged: list[int] = []

    def allreduce(backend: ThreadBackend, *arguments: Any) -> None:
        averaged.append(backend.rank)
        plain(backend, *arguments)

    def train(world: Communicator) -> None:
        grad_reduce = Until(lambda own, before: has_changed(own, before) and len(averaged) > 0)
        one_step(world, 2, Method(grad_reduce, Every(1), WithDistance(Mean())))

    plain = ThreadBackend.allreduce
    with mock.patch.object(ThreadBackend, "allreduce", allreduce):
        threads.run(4, train, timeout=PATIENCE)


def test_a_bucket_crosses_groups_while_the_next_one_is_in_its_group() -> None:
    in_groups: list[int] = []

    def alltoall(backend: ThreadBackend, *arguments: Tensor) -> None:
        in_groups.append(backend.rank)
        plain_alltoall(backend, *arguments)

    def allreduce(backend: ThreadBackend, *arguments: Any) -> None:
        until(lambda: len(in_groups) > 4)
        plain_allreduce(backend, *arguments)

    plain_alltoall, plain_allreduce = ThreadBackend.alltoall, ThreadBackend.allreduce
    with (
        mock.patch.object(ThreadBackend, "alltoall", alltoall),
        mock.patch.object(ThreadBackend, "allreduce", allreduce),
    ):
        threads.run(4, one_step, 2, bsp(), timeout=PATIENCE)


@pytest.mark.parametrize("method", [bsp, lambda: hierarchical(sync_every=1)], ids=["gradients", "models"])
def test_a_bucket_is_gathered_while_the_next_one_crosses_groups(method: Callable[[], Method]) -> None:
    gathered: list[int] = []
    calls: Counter[ThreadBackend] = Counter()

    def allgather(backend: ThreadBackend, *arguments: Tensor) -> None:
        if arguments[0].dtype != torch.uint8:  # uint8 messages only compare the calls of ranks
            gathered.append(backend.rank)
        plain_allgather(backend, *arguments)

    def allreduce(backend: ThreadBackend, *arguments: Any) -> None:
        calls[backend] += 1
        until(lambda: calls[backend] == 1 or len(gathered) > 0)
        plain_allreduce(backend, *arguments)

    plain_allgather, plain_allreduce = ThreadBackend.allgather, ThreadBackend.allreduce
    with (
        mock.patch.object(ThreadBackend, "allgather", allgather),
        mock.patch.object(ThreadBackend, "allreduce", allreduce),
    ):
        threads.run(4, lambda world: one_step(world, 2, method()), timeout=PATIENCE)


@pytest.mark.parametrize(
    "method",
    [
        lambda: hierarchical(2),
        lambda: delayed(hierarchical(2), 1),
        lambda: delayed(hierarchical(1), 1),
        lambda: streaming(hierarchical(2), 2, 1),
    ],
    ids=["alone", "nothing due", "one begins", "a fragment begins"],
)
def test_a_bucket_is_gathered_while_the_next_one_is_updated(method: Callable[[], Method]) -> None:
    """This holds if no synchronization follows the step and no delayed one is due."""
    gathered: list[int] = []
    updated: Counter[ShardedOptimizer] = Counter()

    def allgather(backend: ThreadBackend, *arguments: Tensor) -> None:
        if arguments[0].dtype != torch.uint8:  # uint8 messages only compare the calls of ranks
            gathered.append(backend.rank)
        plain_allgather(backend, *arguments)

    def step_of(local: ShardedOptimizer, buckets: Sequence[Bucket], absent: set[nn.Parameter]) -> None:
        until(lambda: updated[local] == 0 or len(gathered) > 0)
        updated[local] += 1
        plain_step_of(local, buckets, absent)

    plain_allgather, plain_step_of = ThreadBackend.allgather, ShardedOptimizer.step_of
    with (
        in_many_parts(),
        mock.patch.object(ThreadBackend, "allgather", allgather),
        mock.patch.object(ShardedOptimizer, "step_of", step_of),
    ):
        threads.run(4, lambda world: one_step(world, 2, method()), timeout=PATIENCE)
    assert min(updated.values()) > 1


def test_who_is_through_with_each_bucket_by_itself() -> None:
    """Sparse gradient reductions do not finish each bucket separately; they select after the last bucket."""
    assert bsp().grad_reduce.traits.per_bucket
    assert bsp(ReduceScatter()).grad_reduce.traits.per_bucket
    assert WithAllgather(AllToAll()).traits.per_bucket
    assert not Sparse(TopK(0.1)).traits.per_bucket
    assert not WithAllgather(Sparse(TopK(0.1))).traits.per_bucket


@pytest.mark.ranks(2)
def test_hooks_of_the_wrapped_optimizer_are_called_once_and_see_all(run) -> None:
    """The hooks are registered at an optimizer that shows them all parameters, not parts."""

    def train(world: Communicator) -> tuple[list[int], float, int]:
        net = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        made = hpcsgd.DistributedOptimizer(inner, net, form(world), bsp(), bucket_cap_mb=LAYER)
        warm_up = hpcsgd.WarmUp(inner, steps=4, start=0.5)
        seen: list[int] = []
        inner.register_step_pre_hook(
            lambda of, *_: seen.append(sum(x.grad.ne(0).any().item() for x in of.param_groups[0]["params"]))
        )
        inner.register_step_post_hook(lambda of, *_: seen.append(len(of.param_groups[0]["params"])))
        whole = len(inner.param_groups[0]["params"])
        loss(net, *batch(0, world.rank)).backward()
        made.step()
        return seen, warm_up.factor(), whole

    with in_many_parts():
        for seen, factor, whole in run(2, train):
            assert seen == [whole, whole]
            assert factor == 0.5 + 0.5 / 4


@pytest.mark.ranks(2)
def test_hooks_of_all_optimizers_are_called_once(run) -> None:
    seen: list[object] = []
    handle = register_optimizer_step_post_hook(lambda of, *_: seen.append(of))

    def train(world: Communicator) -> object:
        made = one_step_of_many_parts(world)
        return sum(each is made or each is made.local.optimizer for each in seen)

    try:
        with in_many_parts():
            assert run(2, train) == [1, 1]
    finally:
        handle.remove()


def one_step_of_many_parts(world: Communicator, kind: type[optim.SGD] = optim.SGD) -> Any:
    net = make_model()
    made = hpcsgd.DistributedOptimizer(
        kind(net.parameters(), lr=0.1), net, form(world), bsp(), bucket_cap_mb=LAYER, elementwise=True
    )
    loss(net, *batch(0, world.rank)).backward()
    made.step()
    return made


class Counting(optim.SGD):
    """An optimizer that counts its steps itself, as some do in their parameter groups."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.steps += 1
        super().step(closure)


@pytest.mark.ranks(2)
def test_who_is_not_known_makes_one_step(run) -> None:
    """An optimizer of an unknown class makes one step, whatever is declared about its elements."""
    with in_many_parts():
        counts = run(2, lambda world: one_step_of_many_parts(world, Counting).local.optimizer.steps)
    assert counts == [1, 1]


@pytest.mark.ranks(2)
def test_in_parts_the_optimizer_and_its_groups_stay(run) -> None:
    """A scheduler notices each step, and the state counts it once."""

    def train(world: Communicator) -> tuple[list[float], bool, float]:
        net = make_model()
        inner = optim.AdamW(groups_of(net), lr=0.01)
        schedule = optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
        groups = list(inner.param_groups)
        made = hpcsgd.DistributedOptimizer(inner, net, form(world), bsp(), bucket_cap_mb=LAYER)
        params = [list(group["params"]) for group in groups]
        for t in range(2):
            made.zero_grad()
            loss(net, *batch(t, world.rank)).backward()
            made.step()
            schedule.step()
        same = all(a is b for a, b in zip(groups, inner.param_groups, strict=True))
        for mine, group in zip(params, groups, strict=True):
            same &= all(x is y for x, y in zip(mine, group["params"], strict=True))
        (steps,) = {float(state["step"]) for state in inner.state.values()}
        return [group["lr"] for group in groups], same, steps

    with in_many_parts():
        assert run(2, train) == [([0.005, 0.0025], True, 2.0)] * 2


def test_comm_threads_end_with_what_was_never_used() -> None:
    """The threads end even if one passes work to another that is about to end."""

    def leave(world: Communicator) -> None:
        net = make_model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        hpcsgd.DistributedOptimizer(inner, net, form(world, 2), bsp(), bucket_cap_mb=LAYER)
        loss(net, *batch(0, world.rank)).backward()

    before = set(threading.enumerate())
    threads.run(4, leave, timeout=PATIENCE)
    assert set(threading.enumerate()) <= before
