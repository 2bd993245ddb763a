"""What `hpcsgd.cost` says a rank keeps, against the tensors that there are."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Transport, threads
from hpcsgd.core.shards import is_sharded
from hpcsgd.core.topology import form
from hpcsgd.core.traffic import Sizes
from hpcsgd.cost.memory import kept
from hpcsgd.engine.plan import StepPlan
from hpcsgd.methods import (
    Method,
    adacomm,
    allreduce_local_sgd,
    bsp,
    delayed,
    des_loco,
    diloco,
    hierarchical,
    sasgd,
    streamed,
    switch,
)
from hpcsgd.parts import wires
from hpcsgd.parts.exchanges import MomentumCorrection, Packed, ReduceScatter, Sparse
from hpcsgd.parts.sparsifiers import TopK
from methods.table import OF_INTERVALS
from references import batch, loss

EVERY, STEPS = 4, 8
"""In the last step groups meet, or begin to."""
BUCKET_BYTES = 2000.0
PACKED = {"gradients": wires.int8(), "parameters": wires.int4()}

METHODS: dict[str, Callable[[], Method]] = {
    "bsp": bsp,
    "bsp, packed": lambda: bsp(Packed(**PACKED)),
    "hierarchical": lambda: hierarchical(EVERY),
    "reduce-scatter": lambda: hierarchical(EVERY, ReduceScatter()),
    "packed": lambda: hierarchical(EVERY, Packed(**PACKED), average=wires.int4()),
    "halves": lambda: hierarchical(EVERY, Packed(gradients=wires.bf16()), average=wires.fp16()),
    "sparse": lambda: hierarchical(EVERY, Sparse(TopK(0.1), feedback=MomentumCorrection(0.9))),
    "allreduce_local_sgd": lambda: allreduce_local_sgd(EVERY),
    "adacomm": lambda: adacomm(EVERY, block=2),
    "sasgd": lambda: sasgd(EVERY),
    "delayed": lambda: delayed(hierarchical(EVERY), 2),
    "delayed, packed diloco": lambda: delayed(diloco(EVERY, average=wires.int4()), EVERY),
    **{name: partial(make, EVERY) for name, make in OF_INTERVALS.items()},
    "des_loco": lambda: des_loco(EVERY, 3, 5),
    "diloco of 2 bits": lambda: diloco(EVERY, average=wires.int2()),
    "streamed": lambda: streamed(hierarchical(EVERY), 2, EVERY),
    "streamed diloco with Adam": lambda: streamed(diloco(EVERY, optim.Adam), 4, 2),
    "reduce-scatter, then diloco": lambda: switch(bsp(ReduceScatter()), diloco(EVERY), at=EVERY),
    "diloco, then delayed": lambda: switch(diloco(EVERY), delayed(hierarchical(EVERY), 2), at=EVERY),
    "bsp, then never packed": lambda: switch(bsp(), bsp(Packed(**PACKED)), at=STEPS),
    "never packed, then bsp": lambda: switch(bsp(Packed(**PACKED)), bsp(), at=0),
}
WITH_SGD = ("sasgd", "sparse")
"""The others are trained by AdamW, which has two moments."""


def trained(world: Transport, P: int, method: str, dtype: torch.dtype) -> tuple[nn.Module, optim.Optimizer]:
    """The layers' sizes are no multiples of K; biases are next to nothing."""
    layers = (nn.Linear(5, 97), nn.Tanh(), nn.Linear(97, 101), nn.Tanh(), nn.Linear(101, 3))
    net, job = nn.Sequential(*layers).to(dtype), form(world, P)
    make = optim.SGD if method in WITH_SGD else optim.AdamW
    inner = make(net.parameters(), lr=0.01)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, job, METHODS[method](), bucket_mb=BUCKET_BYTES / 1e6)
    for t in range(STEPS):
        optimizer.zero_grad()
        value = loss(net, *batch(t, world.rank, dtype))
        value.backward()
        optimizer.step(loss=value.detach())
    optimizer.method.state_dict()  # meetings under way are over
    return net, optimizer


def covered(runs: Iterable[tuple[int, int]]) -> int:
    """Bytes of all these runs together; parameters have storages of their own inside flat vectors."""
    total = end = 0
    for start, size in sorted(runs):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


@contextlib.contextmanager
def apart() -> Iterator[Callable[[], int]]:
    """Gives what says the bytes of all tensors that are made inside; of their numbers, such as counts of
    steps, none."""

    def living() -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.dim()]
        with torch._C.DisableTorchFunctionSubclass():  # to look at gradients is to average them
            found = [x.untyped_storage() for x in tensors if not is_sharded(x)]  # what these have is local
        return covered((storage.data_ptr(), storage.nbytes()) for storage in found)

    gc.freeze()  # what there is already is not looked at
    try:
        yield living
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("P", "K", "dtype"),
    [
        pytest.param(P, K, dtype, marks=[] if (P, K, dtype) == (2, 2, torch.float32) else [pytest.mark.long])
        for P, K in [(1, 1), (3, 1), (1, 3), (2, 2)]
        for dtype in [torch.float32, torch.bfloat16]
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_tensors_are_those_of_the_formula(method: str, dtype: torch.dtype, P: int, K: int) -> None:
    with apart() as living:
        ranks = threads.run(P * K, trained, P, method, dtype)
        found = living()
    m = Sizes.of(ranks[0][0].named_parameters(), P, K, BUCKET_BYTES)
    (plan, _), *later = StepPlan.of(METHODS[method]()).of_run(STEPS)
    expected = kept(plan, m, 0 if method in WITH_SGD else 2, *(stage for stage, _ in later))
    rest = 0.03 if method == "sparse" else 0.01  # what was sent last is there for a while
    assert found / len(ranks) == pytest.approx(expected, rel=rest)
