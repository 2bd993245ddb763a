"""Orders that keep neighbors together, for data in a file larger than memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcsgd.data import AsRank, DefDP, Sampler, rng


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 2000), st.integers(0, 3))
def test_a_run_comes_at_one_go(run: int, pool: int, n: int, epoch: int) -> None:
    """A whole run comes within a few pools, if the end of an epoch is taken as adjacent to its beginning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "POOL", pool)
        order = rng.epoch_order(n, 3, epoch, run)
    assert sorted(order.tolist()) == list(range(n))
    if n <= run * pool:
        assert order.tolist() == rng.epoch_order(n, 3, epoch).tolist(), "what fits is shuffled plainly"
        return
    places = np.argsort(order)
    for first in range(0, n, run):
        mine = np.sort(places[first : first + run])
        gaps = np.diff(mine, append=mine[0] + n)
        assert n - gaps.max() < run * (3 * pool + 1)


def test_batches_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "POOL", 50)
    one, other = (rng.epoch_order(20_000, 3, epoch, run=10) // 10 for epoch in (0, 1))
    batches = one.reshape(-1, 100)
    assert min(len(set(batch.tolist())) for batch in batches) > 35, "also at the beginning and the end"
    both = zip(batches, other.reshape(-1, 100), strict=True)
    together = np.mean([len(set(a.tolist()) & set(b.tolist())) for a, b in both])
    assert together < 10, "other runs are neighbours in another epoch"


def test_the_order_never_changes() -> None:
    order = rng.epoch_order(3000, 3, 2, run=5)
    assert order[:8].tolist() == [1773, 2554, 1881, 2661, 2488, 1789, 940, 107]


class Text:
    """A `Stream` of 2000 samples."""

    run_length = 10

    def __len__(self) -> int:
        return 2000

    def expect(self, rows: object) -> None:
        pass


def test_what_a_group_owns_comes_in_runs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "POOL", 5)
    owned = [list(Sampler(Text(), AsRank(g, 2), partition=DefDP())) for g in range(2)]
    assert sorted(owned[0] + owned[1]) == list(range(2000))
    for rows in owned:
        runs = np.array(rows) // 10
        assert len(set(runs.tolist())) < 150, "of 200: it owns whole ones, but for those of two pools"
        pools = [len(set(some.tolist())) for some in runs.reshape(-1, 50)]
        assert np.mean(pools) < 25, "of 50 neighbouring samples"
