"""The loader's state, and that a step has the same tokens in the same order on any number of ranks."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from data.originals import write_wikitext
from hpcsgd.data import AsRank, Loader, Sampler, Windows, convert
from hpcsgd.data.loader_processes import require_num_workers
from hpcsgd.errors import UserError

B = 24
"""Windows per step, of all ranks together."""
RANKS = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    convert(
        "wikitext", write_wikitext(folder / "words", {"train": 200, "valid": 9, "test": 9}), folder / "s.h5"
    )
    return folder / "s.h5"


def loaders(data: Windows, n: int, **options: Any) -> list[Loader]:
    return [Loader(data, B // n, Sampler(data, AsRank(rank, n), seed=5), **options) for rank in range(n)]


def digest(batches: list[tuple[Tensor, Tensor]]) -> str:
    """Return a digest of all tokens of a step, in sample order, from the batches of all ranks."""
    whole = [torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*batches, strict=True)]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in whole)).hexdigest()


def digests(ranks: list[Loader], steps: int | None = None) -> list[str]:
    return [digest(list(step)) for step in islice(zip(*ranks, strict=True), steps)]


@pytest.fixture(params=["fits into a pool", "in runs"])
def data(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Windows:
    if request.param == "in runs":
        monkeypatch.setattr("hpcsgd.data.token_segments.RUN", 40)
        monkeypatch.setattr("hpcsgd.data.rng.POOL", 5)
    return Windows(path, "train", bptt=10)


def test_a_step_has_the_same_tokens_for_any_number_of_ranks(data: Windows) -> None:
    assert len(data) % B, "or nothing is left at the end of an epoch"
    alone = loaders(data, 1)
    epochs = [digests(alone) for _ in range(3)]
    assert [len(steps) for steps in epochs] == [len(data) // B] * 3
    assert len({step for steps in epochs for step in steps}) == 3 * (len(data) // B), (
        "epochs have other orders"
    )
    for n in RANKS[1:]:
        several = loaders(data, n)
        assert [digests(several) for _ in range(3)] == epochs


@pytest.mark.parametrize(("n", "then"), [(1, 3), (2, 8), (3, 4), (4, 1), (8, 2), (8, 3)])
def test_it_goes_on_with_another_number(data: Windows, n: int, then: int) -> None:
    alone = loaders(data, 1)
    epochs = [digests(alone) for _ in range(2)]
    for done in range(len(epochs[0]) + 1):
        first = loaders(data, n)
        seen = digests(first, done)
        state = first[0].state_dict()
        assert all(loader.state_dict() == state for loader in first)
        second = loaders(data, then)
        for loader in second:
            loader.load_state_dict(state)
            assert len(loader) == len(epochs[0]) - done
        assert seen + digests(second) == epochs[0]
        assert digests(second) == epochs[1]


@pytest.mark.slow
def test_the_state_is_of_what_was_given_out(path: Path) -> None:
    """The state does not include what loader processes have read ahead."""
    data = Windows(path, "train", bptt=10)
    (loader,) = loaders(data, 1, num_workers=1)
    taken = [digest([batch]) for batch in islice(loader, 3)]
    state = loader.state_dict()
    assert (state["seed"], state["epoch"], state["consumed"]) == (5, 0, 3 * B)
    (other,) = loaders(data, 1)
    assert [*taken, *digests([loader])] == digests([other])
    assert loader.epoch == other.epoch == 1


def test_it_is_saved_like_any_other_that_has_a_state(data: Windows) -> None:
    assert isinstance(loaders(data, 1)[0], Stateful)


def test_images_keep_their_last_batch() -> None:
    samples = torch.utils.data.TensorDataset(torch.arange(50))
    loader = Loader(samples, 8, Sampler(samples, AsRank(1, 4)))
    assert [len(x) for (x,) in loader] == [8, 4]
    assert loader.epoch == 1


def test_what_cannot_be(data: Windows) -> None:
    sampler = Sampler(data, AsRank(0, 2))
    for batch in (0, 2.0):
        with pytest.raises(UserError, match=rf"batch = {batch}: expected a whole number"):
            Loader(data, batch, sampler)  # pyright: ignore[reportArgumentType]
    plain: Any = torch.utils.data.RandomSampler(data)
    with pytest.raises(UserError, match=r"type RandomSampler: expected hpcsgd\.Sampler\(data, topology\)"):
        Loader(data, 2, plain)
    unread: Any = iter([1])
    with pytest.raises(UserError, match="data = an object of type list_iterator: expected a dataset"):
        Loader(unread, 2, sampler)
    with pytest.raises(UserError, match=rf"has 7 samples, and the data has {len(data)} samples: give both"):
        Loader(data, 2, Sampler(7, AsRank(0, 2)))


def test_more_workers_than_any_use_are_refused(data: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(data, AsRank(0, 2))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(
        UserError, match="num_workers = 129: expected at most 128, 64 for each of the 2 cores of this node"
    ):
        Loader(data, 2, sampler, num_workers=129)
    assert require_num_workers(128) == 128
    with pytest.raises(UserError, match="num_workers = -1: expected a whole number"):
        Loader(data, 2, sampler, num_workers=-1)


def test_a_batch_larger_than_an_epoch(data: Windows) -> None:
    sampler = Sampler(data, AsRank(0, 2))
    with pytest.raises(
        UserError, match=r"an epoch has \d+ samples per rank or group, of which a step takes 200"
    ):
        Loader(data, 200, sampler)
