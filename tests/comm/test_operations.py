"""Exact tests of every operation of a backend, for every element type that it supports."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from hpcsgd.comm import Communicator, threads
from hpcsgd.comm.threads import Rendezvous, ThreadBackend

SIZES = [1, 2, 4, 8]
SUMMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
MOVED = [*SUMMED, torch.uint8, torch.int8, torch.int16, torch.bool, torch.float8_e5m2]


def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that differ between ranks and positions, and are small enough for exact sums."""
    return ((torch.arange(count) * 3 + rank) % 7).to(dtype)


def bits(x: Tensor) -> list[int]:
    return x.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize("n", SIZES)
def test_alltoall_brings_everybody_their_run(run, n: int, dtype: torch.dtype) -> None:
    def swap(world: Communicator) -> list[int]:
        out = torch.zeros(n, 3).to(dtype)
        world.alltoall(out, numbers(world.rank, 3 * n, dtype)).wait()
        return bits(out)

    for rank, received in enumerate(run(n, swap)):
        runs = [numbers(i, 3 * n, dtype)[3 * rank : 3 * rank + 3] for i in range(n)]
        assert received == [b for x in runs for b in bits(x)]


@pytest.mark.parametrize("dtype", SUMMED)
@pytest.mark.parametrize("n", SIZES)
def test_reduce_scatter_sums_the_own_run(run, n: int, dtype: torch.dtype) -> None:
    def reduce(world: Communicator) -> Tensor:
        out = torch.full((5,), 9, dtype=dtype)
        world.reduce_scatter(out, numbers(world.rank, 5 * n, dtype)).wait()
        return out

    total = sum(numbers(i, 5 * n, torch.int64) for i in range(n))
    for rank, out in enumerate(run(n, reduce)):
        assert torch.equal(out, total[5 * rank : 5 * rank + 5].to(dtype))


@pytest.mark.parametrize("dtype", MOVED)
@pytest.mark.parametrize("n", SIZES)
def test_allgather_keeps_rank_order(run, n: int, dtype: torch.dtype) -> None:
    def gather(world: Communicator) -> tuple[list[int], list[int]]:
        x = numbers(world.rank, 3, dtype)
        out = torch.zeros(3 * n).to(dtype)
        world.allgather(out, x).wait()
        in_place = torch.zeros(3 * n).to(dtype)
        own = in_place[3 * world.rank : 3 * world.rank + 3]
        own.copy_(x)
        world.allgather(in_place, own).wait()
        return bits(out), bits(in_place)

    expected = [b for i in range(n) for b in bits(numbers(i, 3, dtype))]
    assert run(n, gather) == [(expected, expected)] * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("n", SIZES)
def test_allgatherv_takes_uneven_counts(run, n: int, dtype: torch.dtype) -> None:
    counts = [(3, 0, 5, 1)[i % 4] for i in range(n)]

    def gather(world: Communicator) -> list[int]:
        out = torch.zeros(sum(counts)).to(dtype)
        world.allgatherv(out, numbers(world.rank, counts[world.rank], dtype), counts).wait()
        return bits(out)

    expected = [b for i in range(n) for b in bits(numbers(i, counts[i], dtype))]
    assert run(n, gather) == [expected] * n


@pytest.mark.parametrize("dtype", [*SUMMED, torch.uint8])
@pytest.mark.parametrize("n", SIZES)
def test_allreduce_sums_and_compares(run, n: int, dtype: torch.dtype) -> None:
    """Seven elements are not divisible by the number of ranks, so nothing may rely on equal parts."""

    def reduce(world: Communicator) -> tuple[Tensor, Tensor]:
        total, largest = (numbers(world.rank, 7, dtype) for _ in range(2))
        if dtype != torch.uint8:
            world.allreduce(total).wait()
        world.allreduce(largest, "max").wait()
        return total, largest

    everyone = torch.stack([numbers(i, 7, torch.int64) for i in range(n)])
    for total, largest in run(n, reduce):
        assert dtype == torch.uint8 or torch.equal(total, everyone.sum(0).to(dtype))
        assert torch.equal(largest, everyone.amax(0).to(dtype))


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
@pytest.mark.parametrize("n", [4, 8])
def test_narrow_sums_are_rounded_once(run, n: int, dtype: torch.dtype, large: float) -> None:
    """`large` + 1 rounds back to `large`, so additions in 16 bits would give a smaller sum in any order."""

    def reduce(world: Communicator) -> tuple[Tensor, Tensor]:
        x = torch.tensor([large if world.rank == 0 else 1.0] * n, dtype=dtype)
        out = torch.zeros(1, dtype=dtype)
        world.reduce_scatter(out, x).wait()
        world.allreduce(x).wait()
        return x, out

    right = torch.tensor(large + n - 1).to(dtype)
    stepwise = torch.full((), large, dtype=dtype)
    for _ in range(n - 1):
        stepwise += 1
    assert stepwise < right
    for x, out in run(n, reduce):
        assert torch.equal(x, right.expand(n))
        assert torch.equal(out, right.expand(1))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_integers_are_summed_as_integers(run, n: int) -> None:
    def reduce(world: Communicator) -> int:
        x = torch.tensor([2**53 + 1])
        world.allreduce(x).wait()
        return int(x)

    assert run(n, reduce) == [n * (2**53 + 1)] * n


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_sums_have_the_same_bits_on_every_rank(run, n: int, dtype: torch.dtype) -> None:
    def reduce(world: Communicator) -> list[int]:
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(1001, generator=generator).to(dtype)
        world.allreduce(x).wait()
        return bits(x)

    first, *others = run(n, reduce)
    assert all(other == first for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("n", SIZES)
def test_bcast_from_every_root(run, n: int, dtype: torch.dtype) -> None:
    def spread(world: Communicator) -> list[list[int]]:
        received = []
        for root in range(n):
            x = numbers(world.rank, 5, dtype)
            world.bcast(x, root).wait()
            received.append(bits(x))
        return received

    assert run(n, spread) == [[bits(numbers(root, 5, dtype)) for root in range(n)]] * n


@pytest.mark.parametrize("n", SIZES)
def test_tensors_may_have_any_shape_and_no_elements(run, n: int) -> None:
    """The tensors have no dimensions, several dimensions, or no elements."""

    def reduce(world: Communicator) -> tuple[Tensor, Tensor, int]:
        scalar, matrix = torch.tensor(1.0), torch.ones(2, 3, dtype=torch.bfloat16)
        world.allreduce(scalar).wait()
        world.allreduce(matrix).wait()
        for dtype in (torch.float32, torch.bfloat16):
            nothing = torch.empty(0, dtype=dtype)
            world.allreduce(nothing).wait()
            world.bcast(nothing).wait()
            world.allgather(nothing, torch.empty(0, dtype=dtype)).wait()
            world.alltoall(nothing, torch.empty(0, dtype=dtype)).wait()
            world.reduce_scatter(nothing, torch.empty(0, dtype=dtype)).wait()
        return scalar, matrix, nothing.numel()

    for scalar, matrix, empty in run(n, reduce):
        assert scalar.item() == n
        assert torch.equal(matrix, torch.full((2, 3), n, dtype=torch.bfloat16))
        assert empty == 0


@pytest.mark.parametrize("n", SIZES)
def test_objects_are_gathered_in_rank_order(run, n: int) -> None:
    def gather(world: Communicator) -> list[object]:
        return world.gather_objects({"rank": world.rank, "of": None})

    assert run(n, gather) == [[{"rank": i, "of": None} for i in range(n)]] * n


@pytest.mark.parametrize(
    ("n", "colors"), [(4, [0, 0, 0, 1]), (4, [1, 0, 1, 1]), (8, [0, 1, 1, 0, 2, 0, 1, 1]), (2, [0, 1])]
)
def test_split_makes_uneven_groups_ordered_by_key(run, n: int, colors: list[int]) -> None:
    def gather(world: Communicator) -> tuple[int, int, list[int], Tensor]:
        group = world.split(colors[world.rank], -world.rank)
        counts = [r + 1 for r in group.gather_objects(world.rank)]
        out = torch.zeros(sum(counts))
        group.allgatherv(out, torch.full((world.rank + 1,), float(world.rank)), counts).wait()
        return group.rank, group.size, counts, out

    for rank, (group_rank, size, counts, out) in enumerate(run(n, gather)):
        members = [r for r in reversed(range(n)) if colors[r] == colors[rank]]
        assert (group_rank, size) == (members.index(rank), len(members))
        assert counts == [r + 1 for r in members]
        assert out.tolist() == [float(r) for r in members for _ in range(r + 1)]


@pytest.mark.parametrize(("n", "first"), [(4, 3), (8, 5), (8, 7)])
def test_a_part_is_split_again(run, n: int, first: int) -> None:
    """The parts have odd numbers of ranks; in each of them, every second rank forms a group."""

    def gather(world: Communicator) -> list[int]:
        part = world.split(int(world.rank >= first), -world.rank)
        return part.split(part.rank % 2, part.rank).gather_objects(world.rank)

    parts = [[*reversed(range(first))], [*reversed(range(first, n))]]
    groups = [part[i::2] for part in parts for i in range(2)]
    assert run(n, gather) == [next(group for group in groups if rank in group) for rank in range(n)]


@pytest.mark.parametrize("n", [2, 4, 8])
def test_works_are_carried_out_in_the_order_given(run, n: int) -> None:
    """No rank waits in between; each operation's input is the output of the one before it."""

    def chain(world: Communicator) -> tuple[float, list[int]]:
        pair = world.split(world.rank // 2, world.rank)
        x, order, works = torch.ones(1), [], []
        for i in range(6):
            works.append((world, pair)[i % 2].allreduce(x))
            works.append(world.run(lambda i=i: order.append(i), "note"))
        for work in reversed(works):
            work.wait()
        return x.item(), order

    assert run(n, chain) == [((2.0 * n) ** 3, list(range(6)))] * n


@pytest.mark.parametrize("n", SIZES)
def test_run_is_ordinary_code_on_the_comm_thread(run, n: int) -> None:
    """Operations inside have finished when wait() returns; the caller gets the value or the error."""

    def composite(world: Communicator) -> tuple[float, bool, str]:
        def mean() -> float:
            x = torch.tensor([float(world.rank)])
            world.allreduce(x).wait()
            return (x / n).item()

        work = world.run(mean, "mean")
        on_the_comm_thread = world.run(world.comm_thread.here, "where am I").wait()
        with pytest.raises(KeyError) as raised:
            world.run(lambda: {}["missing"], "fails").wait()
        return work.wait(), on_the_comm_thread and not world.comm_thread.here(), raised.value.args[0]

    assert run(n, composite) == [((n - 1) / 2, True, "missing")] * n


def test_threads_keep_nothing_of_what_was_sent() -> None:
    """No reference may remain after an operation, because the next one may be much later."""
    rendezvous = Rendezvous(3, 30.0, [])

    def gone(world: Communicator) -> bool:
        x = torch.ones(5)
        ThreadBackend(world.rank, rendezvous, 0).allreduce(x, "sum")
        assert x.tolist() == [3.0] * 5
        kept = weakref.ref(x)
        del x
        world.barrier()
        return kept() is None

    assert threads.run(3, gone) == [True] * 3
