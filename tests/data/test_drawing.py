"""Other samplers and evaluations, divided among ranks: every draw comes once; shares may differ in length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.data import AsRank, Loader, Sampler, SelDP
from hpcsgd.errors import JobError, UserError

WEIGHTS = torch.tensor([1.0] * 90 + [9.0] * 10)


class ByLength(torch.utils.data.Sampler[int]):
    """Samples sorted by a length that Python's and numpy's generators draw again in each epoch."""

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        lengths = np.random.rand(50) + random.random()
        return iter(np.argsort(lengths).tolist())


def samplers(ranks: int, new: Any, **options: Any) -> list[Sampler]:
    """Return a sampler per rank, each around a new inner sampler, with different seeds as in processes."""
    made: list[Sampler] = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        made.append(Sampler(new(), AsRank(rank, ranks), **options))
    return made


KINDS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS.tolist(), 100),
    "with its own generator": lambda: WeightedRandomSampler(
        WEIGHTS.tolist(), 100, generator=torch.Generator()
    ),
    "random": lambda: RandomSampler(range(100)),
    "a subset": lambda: SubsetRandomSampler(range(20, 80)),
    "by length": ByLength,
}


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_assigned_one_draw(kind: str, ranks: int) -> None:
    total = len(KINDS[kind]())
    (alone,) = samplers(1, KINDS[kind], seed=3)
    epochs: list[list[int]] = []
    for epoch in range(3):
        alone.set_epoch(epoch)
        whole = list(alone)
        assert len(whole) == total
        hands: list[list[int]] = []
        for sampler in samplers(ranks, KINDS[kind], seed=3):
            sampler.set_epoch(epoch)
            hands.append(list(sampler))
            assert len(hands[-1]) == len(sampler) == total // ranks
        assert [x for card in zip(*hands, strict=True) for x in card] == whole[: total // ranks * ranks]
        epochs.append(whole)
    assert len({tuple(each) for each in epochs}) == 3


def test_weights_count() -> None:
    drawn = [x for sampler in samplers(4, KINDS["weighted"]) for x in sampler]
    assert 30 <= sum(x >= 90 for x in drawn) <= 70  # half of the draws; without weights, a tenth


def test_the_chance_of_others_is_left_alone() -> None:
    (sampler,) = samplers(1, KINDS["with its own generator"])
    states = [torch.get_rng_state(), sampler._drawing.generator.get_state()]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    expected = random.Random()
    expected.setstate(random.getstate())
    list(sampler)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(sampler._drawing.generator.get_state(), states[1])  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    assert random.random() == expected.random()


def test_generators_of_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` would seed generators of devices, too, and dropout would be equal on all ranks."""
    (sampler,) = samplers(1, KINDS["weighted"])
    seeded: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    list(sampler)
    assert seeded == []


def test_large_seeds_are_seeds() -> None:
    (sampler,) = samplers(1, KINDS["weighted"], seed=2**60)
    assert len(list(sampler)) == 100


@pytest.mark.parametrize("then", [1, 2, 5])
def test_it_goes_on_in_the_middle_of_an_epoch_on_other_ranks(then: int) -> None:
    (alone,) = samplers(1, KINDS["weighted"], seed=2)
    alone.set_epoch(1)
    whole = list(alone)
    first = samplers(4, KINDS["weighted"], seed=2)
    for sampler in first:
        sampler.set_epoch(1)
        sampler.advance(10)
    rest: list[list[int]] = []
    for sampler in samplers(then, KINDS["weighted"]):
        sampler.load_state_dict(first[0].state_dict())
        rest.append(list(sampler))
    assert [x for card in zip(*rest, strict=True) for x in card] == whole[40:]


def test_whole_batches_are_assigned() -> None:
    def batches() -> BatchSampler:
        return BatchSampler(WeightedRandomSampler(WEIGHTS.tolist(), 100), 8, drop_last=False)

    (alone,) = samplers(1, batches)
    whole = list(alone)
    hands = [list(sampler) for sampler in samplers(3, batches)]
    assert [batch for card in zip(*hands, strict=True) for batch in card] == whole[:12]
    (first, *_) = samplers(3, batches)
    data = torch.arange(100)
    loader = DataLoader(data, batch_sampler=first)  # pyright: ignore[reportArgumentType]
    assert [batch.tolist() for batch in loader] == hands[0]
    with pytest.raises(
        UserError, match=r"BatchSampler draws batches: give the hpcsgd\.Sampler to DataLoader"
    ):
        list(Loader(range(100), 4, first))  # pyright: ignore[reportArgumentType]


def test_samplers_that_deal_are_refused() -> None:
    job = AsRank(0, 2)
    torchs = DistributedSampler(range(10), num_replicas=2, rank=0)  # pyright: ignore[reportArgumentType]
    for given in (torchs, Sampler(10, job)):
        with pytest.raises(UserError, match="Sampler, which divides samples among ranks: give hpcsgd"):
            Sampler(given, job)
    with pytest.raises(UserError, match="partition: needs a dataset, not a sampler, and drop_last=True"):
        Sampler(RandomSampler(range(10)), job, partition=SelDP())
    with pytest.raises(UserError, match="partition: needs a dataset, not a sampler, and drop_last=True"):
        Sampler(10, job, partition=SelDP(), drop_last=False)


def test_a_length_that_is_not_that_of_the_epoch_is_reported() -> None:
    class Longer(ByLength):
        def __len__(self) -> int:
            return 51

    (sampler,) = samplers(1, Longer)
    with pytest.raises(UserError, match="Longer has drawn 50 samples in epoch 0, and says that it has 51"):
        list(sampler)


class ByTokens(torch.utils.data.Sampler[int]):
    """Draws another number of samples in each epoch, and says so."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths, self._epoch = lengths, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._lengths[self._epoch]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


@pytest.mark.parametrize("length", [98, 103])
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_of_another_length_is_refused_on_all_ranks(length: int, drop_last: bool) -> None:
    """Otherwise ranks would have different numbers of samples, or some samples would never come."""

    def body(world: Communicator) -> str:
        inner = ByTokens([100, length, 100])
        sampler = Sampler(inner, form(world, 4), drop_last=drop_last)
        assert len(list(sampler)) == 25
        sampler.set_epoch(1)
        with pytest.raises(UserError) as caught:
            next(iter(DataLoader(range(110), 5, sampler=sampler)))  # pyright: ignore[reportArgumentType]
        sampler.set_epoch(2)
        assert len(list(sampler)) == 25
        return str(caught.value)

    (said,) = set(threads.run(4, body))
    assert said.startswith(f"ByTokens has drawn {length} samples in epoch 1, and had 100 when hpcsgd.Sampler")


def test_a_sampler_without_an_end_is_reported() -> None:
    class Endless(ByLength):
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    (sampler,) = samplers(1, Endless)
    with pytest.raises(
        UserError, match="Endless has drawn more than 50 samples in epoch 0, and says that it"
    ):
        list(sampler)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("total", [1, 3, 4, 100, 103])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_evaluation_counts_every_sample_once(total: int, ranks: int, shuffle: bool) -> None:
    each = [Sampler(total, AsRank(rank, ranks), shuffle=shuffle, drop_last=False) for rank in range(ranks)]
    hands = [list(sampler) for sampler in each]
    assert sorted(x for hand in hands for x in hand) == list(range(total))
    assert [len(sampler) for sampler in each] == [len(hand) for hand in hands]
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    for sampler, hand in zip(each, hands, strict=True):
        batches = list(DataLoader(range(total), 2, sampler=sampler))  # pyright: ignore[reportArgumentType]
        assert [x for batch in batches for x in batch.tolist()] == hand
        sampler.advance(len(hand) or 1)
        sampler.advance(1)  # also if other ranks have one more sample
        assert len(sampler) == 0 or len(hand) < max(map(len, hands))


def lengths(world: Communicator, loader: Any) -> int:
    return sum(1 for _ in hpcsgd.equal_batches(loader, form(world, 2)))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sized", [True, False])
def test_all_ranks_have_as_many_batches_as_the_one_with_the_fewest(run, sized: bool) -> None:
    def body(world: Communicator) -> int:
        batches = [torch.ones(2)] * [5, 3, 7, 4][world.rank]
        return lengths(world, batches if sized else (x for x in batches))

    assert list(run(4, body)) == [3] * 4


@pytest.mark.ranks(2)
def test_ranks_ask_each_other_once_a_batch(run) -> None:
    def asked(world: Communicator, batches: int) -> int:
        topology = form(world, 2)
        before = sum(total.calls for total in topology.world.stats.totals().values())
        assert sum(1 for _ in hpcsgd.equal_batches(iter(range(batches)), topology)) == batches
        return sum(total.calls for total in topology.world.stats.totals().values()) - before

    def body(world: Communicator) -> int:
        return asked(world, 5) - asked(world, 2)

    assert list(run(2, body)) == [3, 3]


def test_a_loader_that_fails_on_one_rank_ends_all() -> None:
    def failing(world: Communicator) -> Iterator[int]:
        yield 1
        if world.rank == 1:
            raise ZeroDivisionError("no more")
        yield 2

    with pytest.raises(JobError, match="rank 1 of 2, reading a batch: ZeroDivisionError: no more"):
        threads.run(2, lambda world: lengths(world, failing(world)))


def test_a_loader_that_is_shorter_than_its_length_is_refused() -> None:
    class Short:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(
        UserError, match="the loader of rank 1 has the length 5, and ended after batch 3: its"
    ):
        threads.run(2, lambda world: lengths(world, Short() if world.rank else range(5)))
    assert threads.run(2, lambda world: lengths(world, Short() if world.rank else range(3))) == [3, 3]


def test_loaders_with_and_without_a_length_are_refused() -> None:
    with pytest.raises(JobError, match="the loader of rank 1 has no length, and others have one"):
        threads.run(2, lambda world: lengths(world, iter([1]) if world.rank else [1]))
