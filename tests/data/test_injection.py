from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import Topology, form
from hpcsgd.data import (
    AsRank,
    Batches,
    DefDP,
    Injected,
    InjectedBatches,
    Injection,
    Partition,
    Sampler,
    SelDP,
)
from hpcsgd.errors import UserError

PARTS = st.floats(0.01, 1)


class Numbered(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Samples that contain their index i three times: as three bytes, as several booleans and as a number."""

    BYTES = 2 * 3 * 2 + 5 * 1 + 8

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        image = torch.tensor([[i // 256, i % 256, 0], [1, 2, 3]], dtype=torch.bfloat16)
        bits = torch.tensor([bool(i >> bit & 1) for bit in range(5)])
        return image, bits, torch.tensor(i)


def rows(batch: Sequence[Tensor]) -> list[int]:
    """Return the indices of the samples of a batch; check that each is complete and has its dtypes."""
    image, bits, number = batch
    for got, i in zip(zip(image, bits, strict=True), number.tolist(), strict=True):
        for part, sent in zip(got, Numbered(0)[i][:2], strict=True):
            assert part.dtype == sent.dtype
            assert torch.equal(part, sent)
    return number.tolist()


def loaded(
    topology: Topology,
    injection: Injection,
    b: int,
    n: int = 200,
    partition: Partition | None = None,
) -> tuple[Injected, InjectedBatches, Sampler]:
    sampler = Sampler(n, topology, seed=4, partition=partition)
    batches = InjectedBatches(sampler, topology, b, injection)
    return Injected(DataLoader(Numbered(n), batch_sampler=batches), topology), batches, sampler


@given(PARTS, PARTS, st.integers(2, 40), st.integers(2, 300))
def test_portions_make_the_batch(alpha: float, beta: float, P: int, b: int) -> None:
    try:
        own, shared, sharers = Injection(alpha, beta).portions(b, P)
    except UserError:
        assert b <= sharers_of(alpha, P), "nothing is left where each shares one"
        return
    assert own >= 1
    assert own + sharers * shared == b
    assert sharers == sharers_of(alpha, P)
    wanted = beta * b / (1 + alpha * beta * P)
    assert abs(shared - wanted) <= 0.5 or shared == 1 or (shared < wanted and own <= sharers)


def sharers_of(alpha: float, P: int) -> int:
    least = next(S for S in range(P + 1) if alpha * P <= S + 1e-9)
    assert least >= 1
    return least


def test_the_numbers_of_the_paper() -> None:
    """For b = 32 and N = 8, eq. 3 gives b' = 11 and 6. Here b' is what sharing whole samples leaves."""
    assert [round(32 / (1 + part * part * 8)) for part in (0.5, 0.75)] == [11, 6]
    assert Injection(0.5, 0.5).portions(32, 8) == (12, 5, 4)
    assert Injection(0.75, 0.75).portions(32, 8) == (8, 4, 6)
    assert Injection(0.75, 0.75).portions(32, 10) == (8, 3, 8), "4 of each would be all"
    assert Injection(0.07, 0.1).portions(100, 100).sharers == 7
    assert Injection(0.5, 0.5).portions(32, 10) == (7, 5, 5)
    assert Injection(0.5, 0.5).portions(32, 1) == (32, 0, 0)


@pytest.mark.parametrize(("alpha", "beta", "P"), [(0.5, 0.5, 8), (0.5, 0.5, 10), (0.75, 0.75, 8), (1, 1, 5)])
def test_no_whole_number_of_samples_is_nearer_to_equation_3(alpha: float, beta: float, P: int) -> None:
    for b in range(P + 1, 80):
        own, _, S = Injection(alpha, beta).portions(b, P)
        wanted = b / (1 + alpha * beta * P)
        others = [b - S * s for s in range(1, b) if b - S * s >= 1]
        assert abs(own - wanted) == min(abs(other - wanted) for other in others)


@given(PARTS, st.integers(2, 12), st.integers(0, 2**40))
def test_sharers_are_random_and_as_many(alpha: float, P: int, seed: int) -> None:
    injection = Injection(alpha, 0.5)
    steps = [injection.sharers(P, seed, epoch, step) for epoch in range(3) for step in range(4)]
    for sharing in steps:
        assert sharing == sorted(set(sharing))
        assert len(sharing) == sharers_of(alpha, P)
        assert set(sharing) <= set(range(P))


def test_sharers_differ_by_seed_epoch_and_step_and_all_have_their_turn() -> None:
    injection = Injection(0.5, 0.5)
    drawn = {
        tuple(tuple(injection.sharers(6, seed, epoch, step)) for step in range(40))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(drawn) == 9
    turns = Counter(g for steps in drawn for step in steps for g in step)
    assert all(turns[g] == pytest.approx(180, rel=0.2) for g in range(6))
    assert [injection.sharers(4, 3, 2, t) for t in range(5)] == [[1, 2], [0, 3], [0, 3], [2, 3], [0, 1]]


@pytest.mark.slow
@given(st.integers(2, 6), st.integers(1, 3), st.integers(2, 12), PARTS, PARTS, st.data())
def test_all_groups_make_the_same_steps_and_load_what_they_own(
    P: int, K: int, b: int, alpha: float, beta: float, data: st.DataObject
) -> None:
    """The steps are right without communication.

    In each step all groups advance by b' + s samples. Groups that do not share load only b' of them.
    """
    injection = Injection(alpha, beta)
    try:
        own, shared, _ = injection.portions(b, P)
    except UserError:
        assume(False)
        return
    n, lengths = data.draw(st.integers(P * K, 400)), set()
    for rank in range(P * K):
        seat = AsRank(rank, P * K, K)
        sampler = Sampler(n, seat, seed=3, partition=DefDP())
        whole, batches = list(sampler), InjectedBatches(sampler, seat, b, injection)
        steps = list(batches)
        lengths.add((len(steps), len(batches)))
        for step, got in enumerate(steps):
            window = whole[step * (own + shared) : (step + 1) * (own + shared)]
            assert got == (window if seat.group_index in batches.sharers(step) else window[:own])
        done = data.draw(st.integers(0, len(steps)))
        for _ in range(done):
            batches.advance()
        assert (batches.step, len(batches), list(batches)) == (done, len(steps) - done, steps[done:])
    ((steps, length),) = lengths
    assert steps == length == n // P // K // (own + shared)


@pytest.mark.threads(unless={"n": 4, "K": 2})
@pytest.mark.parametrize(("alpha", "beta", "b"), [(0.5, 0.5, 8), (1, 1, 12), (0.3, 0.1, 4), (0.5, 1, 9)])
@pytest.mark.parametrize(("n", "K"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2)])
def test_what_arrives(
    run: Callable[..., list[Any]], n: int, K: int, alpha: float, beta: float, b: int
) -> None:
    """A batch has the own samples, then the last s that each sharing group's rank of this index loaded."""
    injection = Injection(alpha, beta)

    def one(world: Communicator) -> Any:
        topology = form(world, groups=n // K)
        loader, batches, _ = loaded(topology, injection, b, n=160)
        before = world.stats.totals()
        complete = [rows(batch) for batch in loader]
        grown = world.stats.since(before)
        assert len(loader) == len(complete) == len(batches) > 0
        told = [batches.sharers(step) for step in range(len(batches))]
        sent = grown["injection"].bytes if "injection" in grown else 0
        assert set(grown) <= {"injection"}
        return topology.group_index, topology.shard_index, list(batches), complete, told, sent

    P = n // K
    _, s, S = injection.portions(b, P)
    found = run(n, one)
    assert len({str(told) for *_, told, _ in found}) == 1, "the same on all ranks"
    for g, j, lists, complete, told, sent in found:
        for step, got in enumerate(complete):
            assert len(got) == b
            expected = list(lists[step])
            for other, position, of_other, *_ in found:
                if position == j and other != g and other in told[step]:
                    expected += of_other[step][-s:]
            assert got == expected
        turns = sum(g in sharing for sharing in told)
        assert sent == turns * (P - 1) * s * Numbered.BYTES
    steps = len(found[0][3])
    assert sum(sent for *_, sent in found) == steps * S * K * (P - 1) * s * Numbered.BYTES


@pytest.mark.parametrize("partition", [None, SelDP()], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_resumed_in_mid_epoch(run: Callable[..., list[Any]], n: int, partition: Partition | None) -> None:
    """The sampler's state resumes the epoch. A loop without calls of `advance` begins at the beginning."""

    def one(world: Communicator) -> None:
        topology = form(world, groups=n)
        loader, batches, sampler = loaded(topology, Injection(0.5, 0.5), 8, partition=partition)
        sampler.set_epoch(3)
        whole = [rows(batch) for batch in loader]
        assert [rows(batch) for batch in loader] == whole
        for _ in range(2):
            batches.advance()
        state = sampler.state_dict()
        again, _, resumed = loaded(topology, Injection(0.5, 0.5), 8, partition=partition)
        resumed.load_state_dict(state)
        assert [rows(batch) for batch in again] == whole[2:]
        sampler.set_epoch(4)
        assert [rows(batch) for batch in loader] != whole

    run(n, one)


@pytest.mark.parametrize("n", [4])
def test_resumed_with_another_K(run: Callable[..., list[Any]], n: int) -> None:
    """Groups continue after the samples that they have used, and agree on the remaining steps."""

    def one(world: Communicator) -> tuple[int, list[int], int]:
        before = form(world, groups=2)
        _, batches, sampler = loaded(before, Injection(0.5, 0.5), 8, partition=SelDP())
        for _ in range(3):
            batches.advance()
        whole = list(Sampler(200, AsRank(before.group_index, 2), seed=4, partition=SelDP()))
        passed = 3 * 2 * sum(batches.portions[:2])
        after = AsRank(before.group_index, 2)
        resumed = Sampler(200, after, partition=SelDP())
        resumed.load_state_dict(sampler.state_dict())
        assert list(resumed) == whole[passed:]
        left = InjectedBatches(resumed, after, 16, Injection(0.5, 0.5))
        return left.step, left.sharers(left.step), len(list(left))

    assert len({str(found) for found in run(n, one)}) == 1


@pytest.mark.ranks(1)
def test_one_group_has_nobody_to_share_with(run: Callable[..., list[Any]]) -> None:
    def one(world: Communicator) -> None:
        topology = form(world, groups=1)
        loader, _, sampler = loaded(topology, Injection(0.5, 0.5), 8, n=64)
        before = world.stats.totals()
        got = [rows(batch) for batch in loader]
        assert got == list(Batches(sampler, 8))
        assert world.stats.since(before) == {}

    run(1, one)


def test_what_cannot_be() -> None:
    for alpha, beta, wrong in ((0, 0.5, "alpha = 0"), (1.1, 0.5, "alpha"), (0.5, float("nan"), "beta = nan")):
        with pytest.raises(
            UserError,
            match=f"^(Injection: )?{wrong}.*: (must be more than 0 and at most 1|expected a number)",
        ):
            Injection(alpha, beta)
    with pytest.raises(UserError, match=r"8 of 8 groups would share a sample each.* none of the 8"):
        Injection(1, 1).portions(8, 8)
    assert Injection(1, 1).portions(9, 8) == (1, 1, 8)


@pytest.mark.ranks(1)
def test_loaders_that_do_not_fit(run: Callable[..., list[Any]]) -> None:
    def one(world: Communicator) -> None:
        topology = form(world)
        with pytest.raises(UserError, match=r"batch_sampler=InjectedBatches.*given one with BatchSampler"):
            Injected(DataLoader(Numbered(8), 4), topology)
        loader, _, _ = loaded(topology, Injection(0.5, 0.5), 8)
        x = torch.zeros(8, 2)
        for batch, told in (
            ({"x": x}, "expected batches of tensors, given dict"),
            ((x, ["a"] * 8), r"given tuple of \['Tensor', 'list'\]"),
            ((x, x[1:]), r"\[8, 7\] samples were loaded, expected 8"),
        ):
            with pytest.raises(UserError, match=told):
                loader.complete(batch, 0)  # pyright: ignore[reportArgumentType]

    run(1, one)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples with `width` numbers of `dtype`, and a number that is a column of a table."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((self._width,), i, dtype=self._dtype), torch.full((3,), i)

    @staticmethod
    def collated(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])[:, 1]


def injected(world: Communicator, width: int, dtype: torch.dtype) -> Injected:
    topology = form(world, groups=2)
    batches = InjectedBatches(Sampler(64, topology), topology, 8, Injection(1, 0.5))
    data = Rows(width, dtype)
    return Injected(DataLoader(data, batch_sampler=batches, collate_fn=data.collated), topology)


def test_a_column_of_a_table_travels() -> None:
    def one(world: Communicator) -> list[bool]:
        return [torch.equal(x[:, 0].long(), y) for x, y in injected(world, 2, torch.float32)]

    for found in threads.run(2, one):
        assert found
        assert all(found)


@pytest.mark.parametrize("other", [(3, torch.float32), (1, torch.float64)])
def test_rows_that_differ_between_groups_are_refused(other: tuple[int, torch.dtype]) -> None:
    def one(world: Communicator) -> None:
        next(iter(injected(world, *(other if world.rank else (2, torch.float32)))))

    with pytest.raises(UserError, match=r"rows of torch\.float.* and of torch\.float.*: all batches of all"):
        threads.run(2, one)


def test_rows_that_change_are_refused() -> None:
    def one(world: Communicator) -> None:
        loader = injected(world, 2, torch.float32)
        loader.complete((torch.zeros(6, 2), torch.zeros(6)), 0)
        loader.complete((torch.zeros(6, 3), torch.zeros(6)), 1)

    with pytest.raises(UserError, match=r"rows of torch\.float32 \[3\] and .* and of torch\.float32 \[2\]"):
        threads.run(2, one)
