"""Dense reductions of gradients: the results in `g` and `grad_shard`, and how often they were rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcsgd.comm import Communicator, threads
from hpcsgd.core.flat import Bucket, flatten
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.step import GradReduce, ReduceContext, TrainingContext
from hpcsgd.core.topology import Topology, form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.parts.grad_reduces import AcrossGroups, AllReduce, AllToAll, Dense, ReduceScatter, WithAllgather
from hpcsgd.parts.grad_reduces.dense import complete

GRAD_REDUCES: dict[str, GradReduce] = {
    "all-to-all": AllToAll(),
    "reduce-scatter": ReduceScatter(),
    "dense": Dense(),
    "allreduce": AllReduce(),
    "gathered all-to-all": WithAllgather(AllToAll()),
    "gathered reduce-scatter": WithAllgather(ReduceScatter()),
    "all-to-all across groups": AcrossGroups(AllToAll()),
    "allreduce across groups": AcrossGroups(AllReduce()),
}
SIZE = 7  # elements; no K divides it


def context(topology: Topology, bucket: Bucket) -> ReduceContext:
    fixed: Any = {"topology": topology, "buckets": [bucket], "optimizer_state": None}
    return ReduceContext(TrainingContext(**fixed), t=1, rates=(0.0,))


def gradient(rank: int, round_: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype)


def reduced(world: Communicator, P: int, grad_reduce: GradReduce, dtype: torch.dtype) -> list[Tensor]:
    """Return what each rank may use after each of two rounds: its own shard, or all."""
    topology = form(world, groups=P)
    param = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
    (bucket,) = flatten([("p", param)], topology.group_size, topology.shard_index, 1e9)
    found = []
    for round_ in range(2):
        param.grad = gradient(topology.rank, round_, dtype)
        bucket.gather()
        complete(grad_reduce, context(topology, bucket), bucket)
        found.append((bucket.grad_shard if grad_reduce.traits.leaves_shards else bucket.g).clone())
    return found


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 2), (1, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize("name", GRAD_REDUCES)
def test_the_mean_arrives(run, name: str, P: int, K: int) -> None:
    grad_reduce = GRAD_REDUCES[name]
    ranks = run(P * K, reduced, P, grad_reduce, torch.float64)
    for rank, found in enumerate(ranks):
        group = range(rank - rank % K, rank - rank % K + K)
        sources = range(P * K) if isinstance(grad_reduce, AcrossGroups) else group
        for round_, got in enumerate(found):
            mean = torch.stack([gradient(i, round_, torch.float64) for i in sources]).mean(0)
            padded = torch.cat([mean, mean.new_zeros(-SIZE % K)])
            expected = padded.view(K, -1)[rank % K] if grad_reduce.traits.leaves_shards else padded
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K", [4, 8])
def test_the_all_to_all_mean_of_narrow_gradients_is_rounded_once(run, K: int, dtype: torch.dtype) -> None:
    ranks = run(K, reduced, 1, AllToAll(), dtype)
    for round_ in range(2):
        mean = torch.stack([gradient(i, round_, dtype).float() for i in range(K)]).mean(0).to(dtype)
        got = torch.cat([found[round_] for found in ranks])
        assert torch.equal(got[:SIZE], mean)


@pytest.mark.parametrize(
    ("nodes", "dtype", "fitting"),
    [
        ([0, 0, 0, 0], torch.float32, AllToAll()),
        ([0, 1, 2, 3], torch.float32, AllToAll()),  # the network traffic is the same either way
        ([0, 0, 2, 2], torch.float32, ReduceScatter()),
        ([0, 0, 2, 2], torch.float64, ReduceScatter()),
        ([0, 0, 2, 2], torch.bfloat16, AllToAll()),  # rounded once
        ([0, 2, 0, 2], torch.float32, ReduceScatter()),  # counted host by host
        ([0, 0, 0, 3], torch.float32, AllToAll()),
    ],
)
def test_what_fits_where_the_ranks_are(nodes: list[int], dtype: torch.dtype, fitting: GradReduce) -> None:
    def room(world: Communicator, grad_reduce: GradReduce) -> int:
        topology, param = form(world, groups=1), nn.Parameter(torch.zeros(8, dtype=dtype))
        (bucket,) = flatten([("p", param)], topology.group_size, topology.shard_index, 1e9)
        bucket.gather()
        grad_reduce(context(topology, bucket), bucket)
        assert bucket.received is not None
        return bucket.received.numel()

    assert threads.run(4, room, Dense(), nodes=nodes) == threads.run(4, room, fitting, nodes=nodes)


@pytest.mark.parametrize(
    ("ranks_per_host", "dtype", "fitting"),
    [
        *((several, torch.float32, AllToAll()) for several in (None, 8, 4, 3, 1)),
        (2, torch.float32, ReduceScatter()),
        (2, torch.float16, AllToAll()),
    ],
)
def test_what_fits_is_predicted(ranks_per_host: int | None, dtype: torch.dtype, fitting: GradReduce) -> None:
    named = [("p", nn.Parameter(torch.zeros(9, dtype=dtype)))]
    m = ModelLayout.of(named, P=2, K=4, bucket_bytes=1e6, ranks_per_host=ranks_per_host)
    assert list(comm_ops(Dense(), m)) == list(comm_ops(fitting, m))
    assert Dense().memory_bytes(m) == fitting.memory_bytes(m)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("P", "K", "busy"), [(1, 1, set()), (1, 2, set(GRAD_REDUCES)), (2, 1, {"across"})])
def test_idle_where_there_is_nobody_to_talk_to(run, P: int, K: int, busy: set[str]) -> None:
    def idle(world: Communicator) -> dict[str, bool]:
        topology = form(world, groups=P)
        return {name: grad_reduce.idle(topology) for name, grad_reduce in GRAD_REDUCES.items()}

    for found in run(P * K, idle):
        assert found == {name: not any(word in name for word in busy) for name in GRAD_REDUCES}
