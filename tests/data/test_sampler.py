from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import Topology, form
from hpcsgd.data import AsRank, DefDP, Overlapping, Sampler, SelDP
from hpcsgd.data.partition import Partition
from hpcsgd.errors import JobError, UserError


def samplers(total: int, ranks: int, **options: Any) -> list[Sampler]:
    return [Sampler(total, AsRank(rank, ranks), **options) for rank in range(ranks)]


def assigned(ranks: list[Sampler]) -> list[int]:
    """Return the samples of all ranks, taken in turn."""
    return [index for turn in zip(*ranks, strict=True) for index in turn]


sizes = st.integers(1, 9).flatmap(lambda ranks: st.tuples(st.integers(ranks, 80), st.just(ranks)))
seeds = st.integers(0, 2**40)
epochs = st.integers(0, 1000)


def test_the_permutation_never_changes() -> None:
    (sampler,) = samplers(12, 1, seed=3)
    sampler.set_epoch(2)
    assert list(sampler) == [4, 10, 0, 8, 5, 3, 9, 7, 6, 1, 2, 11]


@given(sizes, seeds, epochs)
def test_ranks_share_one_permutation(size: tuple[int, int], seed: int, epoch: int) -> None:
    total, ranks = size
    (alone,) = samplers(total, 1, seed=seed)
    several = samplers(total, ranks, seed=seed)
    for sampler in [alone, *several]:
        sampler.set_epoch(epoch)
    together = assigned(several)
    assert sorted(alone) == list(range(total))
    assert together == list(alone)[: total // ranks * ranks]
    assert {len(sampler) for sampler in several} == {total // ranks}


@given(sizes, seeds, st.floats(0, 1))
def test_shares_may_overlap(size: tuple[int, int], seed: int, more: float) -> None:
    total, ranks = size
    share = 1 / ranks + more * (1 - 1 / ranks)
    hands = [list(sampler) for sampler in samplers(total, ranks, seed=seed, partition=Overlapping(share))]
    assert {len(hand) for hand in hands} == {max(int(share * total), total // ranks)}
    assert all(len(set(hand)) == len(hand) for hand in hands), "nothing comes twice to a rank"
    plain = [list(sampler) for sampler in samplers(total, ranks, seed=seed)]
    assert [hand[: len(own)] for hand, own in zip(hands, plain, strict=True)] == plain


def test_the_shares_of_the_paper() -> None:
    one, other = (set(sampler) for sampler in samplers(50_000, 2, partition=Overlapping(0.75)))
    assert (len(one), len(other), len(one & other)) == (37_500, 37_500, 25_000)


def test_a_share_goes_on_where_it_was() -> None:
    (_, sampler) = samplers(40, 2, partition=Overlapping(0.75))
    whole = list(sampler)
    sampler.advance(12)
    assert list(sampler) == whole[12:]
    for share in (0.4, 1.1):
        with pytest.raises(UserError, match="each of 2 groups needs 1/P to 1"):
            samplers(40, 2, partition=Overlapping(share))


@given(sizes, seeds, epochs, st.data())
def test_a_resumed_epoch_sees_each_sample_once(
    size: tuple[int, int], seed: int, epoch: int, data: st.DataObject
) -> None:
    total, ranks = size
    first = samplers(total, ranks, seed=seed)
    seen: list[int] = []
    done = data.draw(st.integers(0, total // ranks))
    for sampler in first:
        sampler.set_epoch(epoch)
        seen += list(sampler)[:done]
        sampler.advance(done)
    state = first[0].state_dict()
    assert all(sampler.state_dict() == state for sampler in first)
    assert state == {
        "seed": seed, "epoch": epoch, "consumed": done * ranks, "samples": total, "ranks": ranks
    }  # fmt: skip

    others = samplers(total, data.draw(st.integers(1, min(9, total))))
    for sampler in others:
        sampler.load_state_dict(state)
    rest = assigned(others)
    assert len(rest) == (total - done * ranks) // len(others) * len(others)
    assert len(set(seen + rest)) == len(seen) + len(rest)
    (alone,) = samplers(total, 1, seed=seed)
    alone.set_epoch(epoch)
    assert rest == list(alone)[done * ranks :][: len(rest)]


@given(sizes, st.data())
def test_start_is_counted_per_rank(size: tuple[int, int], data: st.DataObject) -> None:
    total, ranks = size
    start = data.draw(st.integers(0, total // ranks))
    for sampler in samplers(total, ranks, seed=1):
        sampler.set_epoch(4)
        whole = list(sampler)
        sampler.set_epoch(4, start=start)
        assert list(sampler) == whole[start:]
        assert len(sampler) == len(whole) - start


def test_an_epoch_that_it_is_in_goes_on() -> None:
    """A script may load a checkpoint and then call `set_epoch` as always."""
    (saved,), (resumed,) = samplers(10, 1), samplers(10, 1)
    saved.set_epoch(2)
    whole = list(saved)
    saved.advance(4)
    resumed.load_state_dict(saved.state_dict())
    resumed.set_epoch(2)
    assert list(resumed) == whole[4:]
    resumed.set_epoch(3)
    assert len(resumed) == 10
    resumed.advance(1)
    resumed.set_epoch(3, start=0)
    assert len(resumed) == 10


def test_epochs_and_seeds_differ_and_so_do_the_samples_left_out() -> None:
    (sampler,) = samplers(50, 1, seed=0)
    (other,) = samplers(50, 1, seed=1)
    orders = [tuple(other)]
    for epoch in range(20):
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 21
    left_out = set()
    for epoch in range(20):
        ranks = samplers(50, 7)
        for rank in ranks:
            rank.set_epoch(epoch)
        (missing,) = set(range(50)) - set(assigned(ranks))
        left_out.add(missing)
    assert len(left_out) > 10


def test_reading_ahead_consumes_nothing() -> None:
    (sampler,) = samplers(10, 1)
    loader = DataLoader(range(10), 2, sampler=sampler)  # pyright: ignore[reportArgumentType]
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in loader]
    assert sampler.state_dict()["consumed"] == 0
    sampler.advance(4)
    assert len(loader) == 3
    assert sampler.state_dict()["consumed"] == 4


def test_in_order() -> None:
    assert [list(sampler) for sampler in samplers(7, 3, shuffle=False)] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("given", [1.5, None, "1", torch.ones(2, dtype=torch.int64), 2**63])
def test_what_is_no_whole_number_is_reported_in_one_line(given: Any) -> None:
    with pytest.raises(UserError, match=r"seed = .*: expected a whole number"):
        samplers(8, 1, seed=given)
    (sampler,) = samplers(8, 1)
    with pytest.raises(UserError, match=r"epoch = .*: expected a whole number"):
        sampler.set_epoch(given)


def test_whole_numbers_of_other_libraries_are_taken() -> None:
    (one,), (other,) = samplers(8, 1, seed=np.int32(3)), samplers(8, 1, seed=3)
    one.set_epoch(torch.tensor(2))  # pyright: ignore[reportArgumentType]
    other.set_epoch(2)
    assert (list(one), one.state_dict()) == (list(other), other.state_dict())


PARTITIONS_MEANT = {
    "seldp": r"did you mean hpcsgd\.SelDP\(\)\?",
    "by_label": r"did you mean hpcsgd\.ByLabel\(\)\?",
    "x": r"partition = 'x': expected a Partition or None, as hpcsgd.ByLabel\(\) makes it; allowed: ByLabel, ",
    SelDP: r"partition = SelDP: .* did you mean hpcsgd\.SelDP",
}


@pytest.mark.parametrize("given", PARTITIONS_MEANT)
def test_what_is_no_partition_is_reported_in_one_line(given: Any) -> None:
    with pytest.raises(UserError, match=PARTITIONS_MEANT[given]):
        samplers(8, 2, partition=given)


def trained(world: Communicator, sampler: Callable[[Topology], Sampler], used: bool = True) -> None:
    topology = form(world, 2)
    model = torch.nn.Linear(1, 1)
    optimizer = hpcsgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, topology, hpcsgd.bsp()
    )
    if used:
        next(iter(sampler(topology)))
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()


UNLIKE: dict[str, tuple[Callable[[Topology], Sampler], str]] = {
    "seed": (
        lambda topology: Sampler(8, topology, seed=topology.rank),
        "the seed of a sampler is 0 on rank 0 and 1 on rank 1",
    ),
    "length": (
        lambda topology: Sampler(8 + topology.rank, topology),
        "the length of the data of a sampler is 8 on rank 0 and 9 on rank 1",
    ),
    "partition": (
        lambda topology: Sampler(8, topology, partition=SelDP() if topology.rank else DefDP()),
        r"the partition of a sampler is DefDP\(\) on rank 0 and SelDP\(\) on rank 1",
    ),
    "labels": (
        lambda topology: Sampler(4, topology, labels=[topology.rank] * 4),
        "the digest of the labels of a sampler is ",
    ),
    "draw": (
        lambda topology: Sampler(SubsetRandomSampler(range(topology.rank, 4 + topology.rank)), topology),
        "the digest of what SubsetRandomSampler draws is ",
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_unlike_samplers_are_reported_in_the_first_step(what: str) -> None:
    made, line = UNLIKE[what]
    with pytest.raises(JobError, match=f"ranks 0 and 1 differ: {line}"):
        threads.run(2, lambda world: trained(world, made))


def test_a_sampler_that_one_rank_looks_into_is_nobody_elses() -> None:
    threads.run(2, lambda world: trained(world, lambda topology: Sampler(8, topology), used=world.rank == 1))


def test_the_length_of_a_dataset() -> None:
    assert len(Sampler(list("abcdef"), AsRank(0, 2))) == 3


def test_what_cannot_be() -> None:
    with pytest.raises(UserError, match="3 samples cannot be divided among 4 ranks"):
        samplers(3, 4)
    with pytest.raises(UserError, match="seed = -1: expected a whole number from 0"):
        samplers(3, 1, seed=-1)
    (sampler,) = samplers(10, 1)
    with pytest.raises(UserError, match="epoch = -1: expected a whole number"):
        sampler.set_epoch(-1)
    with pytest.raises(UserError, match="11 samples consumed of an epoch of 10"):
        sampler.advance(11)
    with pytest.raises(UserError, match="12 samples consumed of an epoch of 10"):
        sampler.load_state_dict({"seed": 0, "epoch": 0, "consumed": 12, "samples": 10, "ranks": 1})
    with pytest.raises(UserError, match="older version"):
        sampler.load_state_dict({"seed": 0, "epoch": 0, "consumed": 2})
    assert list(sampler.state_dict().values()) == [0, 0, 0, 10, 1]


@pytest.mark.parametrize("now", [5, 9, 11, 20])
def test_other_samples_in_the_middle_of_an_epoch_are_refused(now: int) -> None:
    """The sampler keeps its own state if it refuses the other one."""
    (saved,), (resumed,) = samplers(10, 1, seed=3), samplers(now, 1)
    saved.set_epoch(2, start=4)
    line = (
        f"in the middle of an epoch of 10 samples, of which 4 have been taken, and now there are {now}: "
        r".* set_epoch\(3\)"
    )
    with pytest.raises(UserError, match=line):
        resumed.load_state_dict(saved.state_dict())
    assert (resumed.epoch, resumed.seed, len(resumed)) == (0, 0, now)


@pytest.mark.parametrize("partition", [None, SelDP(), DefDP()], ids=str)
@pytest.mark.parametrize(("taken", "left"), [(0, 6), (3, 0)])
def test_other_samples_from_the_next_epoch_on(partition: Partition | None, taken: int, left: int) -> None:
    """Resuming works at the beginning of an epoch, and at its end, where one of ten samples is left out."""
    saved = Sampler(9 if partition else 10, AsRank(0, 3), seed=3, partition=partition)
    saved.set_epoch(2, start=len(saved) if taken else 0)
    resumed = Sampler(18, AsRank(0, 3), partition=partition)
    whole = len(resumed)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.epoch, resumed.seed) == (2, 3)
    assert len(resumed) == (whole if left else 0)
    resumed.set_epoch(3)
    assert len(resumed) == whole


@pytest.mark.parametrize(("groups", "left"), [(4, 350), (3, 350), (2, 350), (1, 600), (8, 350)])
def test_a_position_is_that_of_each_group_with_any_number_of_groups(groups: int, left: int) -> None:
    """One group alone has all 1000 samples, and each of several has three quarters of them."""
    sampler = Sampler(1000, AsRank(0, 4), seed=1, partition=Overlapping(0.75))
    sampler.advance(400)
    position = sampler.position
    sampler.assigned(0, groups)
    sampler.set_epoch(0, start=0)
    sampler.resume(position)
    assert len(sampler) == left
    assert sampler.position == 400
    sampler.resume(2000)
    assert len(sampler) == 0, "the last group had more samples than each has now"


def test_a_position_without_a_partition_is_that_of_all_ranks() -> None:
    sampler = Sampler(1000, AsRank(0, 4))
    sampler.advance(100)
    assert sampler.position == 400
    sampler.assigned(0, 2)
    sampler.resume(400)
    assert len(sampler) == 300
    with pytest.raises(UserError, match="1,001 samples consumed of an epoch of 1000"):
        sampler.resume(1001)
