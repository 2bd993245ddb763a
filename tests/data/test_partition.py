from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsgd.data import AsRank, Batches, ByLabel, DefDP, Dirichlet, Overlapping, Partition, Sampler, SelDP
from hpcsgd.data.partition import Samples
from hpcsgd.errors import UserError


@dataclass(frozen=True)
class Shape:
    """A data set of n samples with labels, for P groups of K ranks."""

    n: int
    P: int
    K: int
    seed: int
    C: int

    @property
    def labels(self) -> np.ndarray:
        return np.arange(self.n) * 11 % self.C


SHAPES = st.builds(
    lambda P, K, more, seed, C: Shape(P * K + more, P, K, seed, C),
    st.integers(1, 6), st.integers(1, 4), st.integers(0, 90), st.integers(0, 2**40), st.integers(1, 8),
)  # fmt: skip
EPOCHS = st.integers(0, 500)
EVEN: list[Partition] = [SelDP(), DefDP(), Overlapping(1.0)]
"""The partitions that do not use labels."""


def samplers(shape: Shape, partition: Partition, epoch: int = 0, K: int | None = None) -> list[list[Sampler]]:
    """Return the samplers by group and shard index."""
    K = K or shape.K
    made = [
        Sampler(
            shape.n, AsRank(rank, shape.P * K, K), seed=shape.seed, partition=partition, labels=shape.labels
        )
        for rank in range(shape.P * K)
    ]
    for sampler in made:
        sampler.set_epoch(epoch)
    return [made[g * K : (g + 1) * K] for g in range(shape.P)]


def hand(positions: list[Sampler]) -> list[int]:
    """Return the samples of a group, taken from its ranks in turn."""
    return [row for turn in zip(*positions, strict=True) for row in turn]


def hands(shape: Shape, partition: Partition, epoch: int = 0) -> list[list[int]]:
    return [hand(group) for group in samplers(shape, partition, epoch, K=1)]


@given(SHAPES, EPOCHS)
def test_seldp_all_groups_see_everything_and_never_the_same_part(shape: Shape, epoch: int) -> None:
    """Chunk c holds the samples that group c sees first."""
    P, length = shape.P, shape.n // shape.P
    found = hands(shape, SelDP(), epoch)
    cuts = [group[:length] for group in found]
    everything = [row for cut in cuts for row in cut]
    assert len(set(everything)) == len(everything) == P * length
    for g, group in enumerate(found):
        assert group == [row for turn in range(P) for row in cuts[(g + turn) % P]]
    for rows in zip(*found, strict=True):
        assert len(set(rows)) == P


def test_seldp_parts_are_cut_anew_in_every_epoch() -> None:
    shape = Shape(50, 4, 1, 3, 1)
    left_out = set()
    for epoch in range(30):
        first, *_ = hands(shape, SelDP(), epoch)
        left_out |= set(range(50)) - set(first)
    assert len(left_out) > 20


@given(SHAPES, EPOCHS)
def test_defdp_groups_have_parts_of_their_own(shape: Shape, epoch: int) -> None:
    """A group has the same samples in every epoch."""
    first, later = hands(shape, DefDP(), epoch), hands(shape, DefDP(), epoch + 1)
    for one, other in zip(first, later, strict=True):
        assert len(one) == len(other) == shape.n // shape.P
        assert len(set(one)) == len(one) or shape.n % shape.P, "a pass may end in the middle of an epoch"
    owned = [set(one) | set(other) for one, other in zip(first, later, strict=True)]
    assert sum(map(len, owned)) == len(set.union(*owned))
    assert shape.n % shape.P or set.union(*owned) == set(range(shape.n))


def test_defdp_shuffles_the_data_and_each_epoch() -> None:
    shape = Shape(40, 2, 1, 5, 1)
    one, other = hands(shape, DefDP(), 0), hands(shape, DefDP(), 1)
    assert sorted(one[0]) == sorted(other[0]) != list(range(20))
    assert one[0] != other[0]


@given(SHAPES, EPOCHS)
def test_by_label_each_group_has_labels_of_its_own(shape: Shape, epoch: int) -> None:
    shape = Shape(max(shape.n, 7 * 8 * shape.P), shape.P, shape.K, shape.seed, shape.C)
    seen = [{int(shape.labels[row]) for row in group} for group in hands(shape, ByLabel(), epoch)]
    count = Counter(label for labels in seen for label in labels)
    assert max(map(len, seen)) <= -(-shape.C // shape.P), "as few labels as there can be"
    assert max(count.values()) <= -(-shape.P // shape.C), "as few groups as there can be"


def test_by_label_one_label_for_each_group() -> None:
    shape = Shape(100, 10, 1, 0, 10)
    for g, group in enumerate(hands(shape, ByLabel())):
        assert {shape.labels[row] for row in group} == {g}


OWNED: list[Partition] = [DefDP(), ByLabel(), Dirichlet(1.0)]


@pytest.mark.slow
@pytest.mark.parametrize("partition", OWNED, ids=str)
@given(st.integers(0, 2**20))
@settings(max_examples=15)
def test_what_is_owned_is_seen_in_turn(partition: Partition, seed: int) -> None:
    """Over many epochs, the numbers of times that a group sees its samples differ by at most 1."""
    shape = Shape(103, 4, 1, seed, 6)
    try:
        epochs = [hands(shape, partition, epoch) for epoch in range(30)]
    except UserError:
        return  # a group happened to get no samples
    owners: dict[int, int] = {}
    for g in range(shape.P):
        counts = Counter(row for epoch in epochs for row in epoch[g])
        assert sum(counts.values()) == 30 * (103 // 4)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert all(owners.setdefault(row, g) == g for row in counts), "nobody else's"
    if max(Counter(owners.values()).values()) <= 30 * (103 // 4):
        assert set(owners) == set(range(103)), "all are somebody's"


def label_counts(shape: Shape, partition: Dirichlet) -> np.ndarray:
    """Return the number of samples that each group owns, as [group, label]."""
    from hpcsgd.data.partition import Samples

    shares = partition.shares(Samples(shape.n, shape.P, shape.seed, labels=shape.labels))
    assert sorted(np.concatenate(shares).tolist()) == list(range(shape.n))
    return np.stack([np.bincount(shape.labels[rows], minlength=shape.C) for rows in shares])


@given(st.integers(0, 2**40))
def test_dirichlet_of_a_large_alpha_is_nearly_iid(seed: int) -> None:
    counts = label_counts(Shape(4000, 4, 1, seed, 5), Dirichlet(1e6))
    assert abs(counts - 200).max() <= 3


@given(st.integers(0, 2**40))
def test_dirichlet_of_a_small_alpha_gives_each_label_to_one_group(seed: int) -> None:
    """Two groups share a label with probability about 6α; two of five labels are shared once in 10⁹ seeds."""
    counts = label_counts(Shape(4000, 4, 1, seed, 5), Dirichlet(1e-6))
    assert (counts.max(axis=0) > 700).sum() >= 4


def test_dirichlet_has_the_variance_of_its_alpha() -> None:
    """Over many seeds and labels, Var p = (1/P)(1 − 1/P)/(αP + 1)."""
    for alpha in (0.1, 1.0, 10.0):
        parts = [label_counts(Shape(8000, 4, 1, seed, 8), Dirichlet(alpha)) / 1000 for seed in range(60)]
        wanted = 0.25 * 0.75 / (4 * alpha + 1)
        assert np.var(parts) == pytest.approx(wanted, rel=0.15)


def test_the_numbers_never_change() -> None:
    """Resumed runs rely on these numbers, with any version of numpy."""
    shape = Shape(12, 3, 1, 3, 4)
    assert hands(shape, SelDP(), 2)[1] == [5, 3, 9, 7, 6, 1, 2, 11, 4, 10, 0, 8]
    assert hands(shape, DefDP(), 2)[1] == [2, 5, 8, 10]
    counts = label_counts(Shape(400, 3, 1, 3, 4), Dirichlet(0.5))
    assert counts.tolist() == [[72, 57, 0, 47], [27, 42, 36, 40], [1, 1, 64, 13]]


@pytest.mark.slow
@given(SHAPES, st.floats(0, 1), EPOCHS)
def test_overlapping_groups(shape: Shape, more: float, epoch: int) -> None:
    share = 1 / shape.P + more * (1 - 1 / shape.P)
    found = hands(shape, Overlapping(share), epoch)
    for group in found:
        assert len(set(group)) == len(group) == max(int(share * shape.n), shape.n // shape.P)


def test_two_groups_with_three_quarters_share_half() -> None:
    one, other = (set(group) for group in hands(Shape(1000, 2, 1, 0, 1), Overlapping(0.75)))
    assert (len(one), len(other), len(one & other)) == (750, 750, 500)


@pytest.mark.slow
@pytest.mark.parametrize("partition", [*EVEN, ByLabel(), Dirichlet(50.0)], ids=str)
@given(SHAPES, EPOCHS, st.data())
def test_positions_hold_the_batches_of_their_group(
    partition: Partition, shape: Shape, epoch: int, data: st.DataObject
) -> None:
    """A step takes K·b consecutive samples for every K, and all groups make equally many steps."""
    shape = Shape(shape.n + 60, shape.P, shape.K, shape.seed, min(shape.C, 3))
    b = data.draw(st.integers(1, 7))
    whole = hands(shape, partition, epoch)
    for rows, group in zip(whole, samplers(shape, partition, epoch), strict=True):
        steps = [list(Batches(sampler, b)) for sampler in group]
        assert len({len(of_rank) for of_rank in steps}) == 1
        batches = list(zip(*steps, strict=True))
        B = b * shape.K
        for number, parts in enumerate(batches[:-1]):
            assert sorted(row for part in parts for row in part) == sorted(
                rows[number * B : (number + 1) * B]
            )
    assert len({len(rows) for rows in whole}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("partition", [*EVEN, ByLabel(), Dirichlet(50.0)], ids=str)
@given(SHAPES, EPOCHS, st.data())
def test_resumed_anywhere_with_another_K(
    partition: Partition, shape: Shape, epoch: int, data: st.DataObject
) -> None:
    shape = Shape(shape.n + 60, shape.P, shape.K, shape.seed, min(shape.C, 3))
    whole = hands(shape, partition, epoch)
    done = data.draw(st.integers(0, len(whole[0]) // shape.K))
    first = [sampler for group in samplers(shape, partition, epoch) for sampler in group]
    for sampler in first:
        sampler.advance(done)
    (state,) = {tuple(sampler.state_dict().items()) for sampler in first}
    K = data.draw(st.integers(1, 6))
    for rows, group in zip(whole, samplers(shape, partition, K=K), strict=True):
        for sampler in group:
            sampler.load_state_dict(dict(state))
        rest = rows[done * shape.K :]
        assert hand(group) == rest[: len(rest) // K * K]


@pytest.mark.parametrize("before", [*EVEN, None], ids=str)
@pytest.mark.parametrize("after", [*EVEN, None], ids=str)
def test_resumed_with_other_groups_at_the_same_part_of_the_epoch(
    before: Partition | None, after: Partition | None
) -> None:
    saved = Sampler(144, AsRank(0, 4), partition=before)
    saved.set_epoch(2, start=len(saved) // 3)
    resumed = Sampler(144, AsRank(1, 3), partition=after)
    whole = len(resumed)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.epoch, len(resumed)) == (2, whole * 2 // 3)


def test_in_order() -> None:
    seats = [AsRank(rank, 2) for rank in range(2)]
    found = {
        str(partition): [list(Sampler(5, seat, shuffle=False, partition=partition)) for seat in seats]
        for partition in (SelDP(), DefDP(), Overlapping(0.8))
    }
    assert found == {
        "SelDP()": [[0, 1, 2, 3], [2, 3, 0, 1]],
        "DefDP()": [[0, 1], [3, 4]],
        "Overlapping(share=0.8)": [[0, 2, 4, 1], [1, 3, 0, 2]],
    }


def test_what_cannot_be() -> None:
    labels = np.arange(20) % 2
    with pytest.raises(UserError, match=r"Dirichlet\(alpha=1e-06\): none of 20 samples for group \d of 8"):
        Sampler(20, AsRank(0, 8), partition=Dirichlet(1e-6), labels=labels)
    for given_labels, told in ((None, "none are given"), (labels[:3], r"given are labels of shape \(3,\)")):
        with pytest.raises(UserError, match=rf"ByLabel\(\) divides 20 samples by their labels: {told}"):
            Sampler(20, AsRank(0, 2), partition=ByLabel(), labels=given_labels)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"alpha = .*: (must be a number > 0|expected a number)"):
            Dirichlet(alpha)
    for share in (0.4, 1.1):
        with pytest.raises(UserError, match="each of 2 groups needs 1/P to 1"):
            Sampler(20, AsRank(0, 4, group_size=2), partition=Overlapping(share))


def test_cards_of_others_come_after_the_own_ones() -> None:
    """The samples of the following groups fill the share, cyclically."""
    samples = Samples(n=11, P=3, seed=0, shuffle=False)
    partition = Overlapping(0.8)
    assert [partition.assign(samples, g, epoch=0).tolist() for g in range(3)] == [
        [0, 3, 6, 9, 1, 4, 7, 10],
        [1, 4, 7, 10, 2, 5, 8, 0],
        [2, 5, 8, 0, 3, 6, 9, 1],
    ]
