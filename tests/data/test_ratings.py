from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from data.originals import ratings, write_movielens
from hpcsgd.data import AsRank, ByLabel, ImageDataset, Ratings, Sampler, Windows, convert, open_split
from hpcsgd.errors import UserError

USERS, EACH = 12, 9


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ratings")
    convert("movielens", write_movielens(folder / "ml", ratings(USERS, each=EACH)), folder / "store.h5")
    return folder / "store.h5"


def whole(data: Ratings) -> tuple[Tensor, Tensor]:
    return data.collate(data.__getitems__(range(len(data))))


def test_samples(path: Path) -> None:
    train, test = Ratings(path, "train"), Ratings(path, "test")
    x, y = whole(train)
    assert (x.shape, y.shape) == ((len(train), 1, 2), (len(train), 1))
    assert (x.dtype, y.dtype) == (torch.int64, torch.float32)
    assert y.all()
    tested, right = whole(test)
    assert (tested.shape, right.shape) == ((USERS, 100, 2), (USERS, 100))
    assert torch.equal(right, torch.eye(100)[:1].expand(USERS, -1))
    assert (tested[..., 0] == tested[:, :1, 0]).all()
    positives = {tuple(pair) for pair in torch.cat([x[:, 0], tested[:, 0]]).tolist()}
    assert len(positives) == len(train) + USERS
    assert not positives & {tuple(pair) for pair in tested[:, 1:].flatten(0, 1).tolist()}
    assert (train.users, train.items) == (int(x[..., 0].max()) + 1, 160)


def test_negatives_are_never_rated_and_each_as_likely(path: Path) -> None:
    data = Ratings(path, "train", negatives=40)
    x, y = whole(data)
    rated = {tuple(pair) for pair in x[:, 0].tolist()}
    many = 8
    varied, targets = data.vary(x.repeat(many, 1, 1), y.repeat(many, 1), Generator().manual_seed(1))
    assert varied.shape == (many * len(data), 41, 2)
    assert torch.equal(varied[:, :1], x.repeat(many, 1, 1))
    assert torch.equal(targets, torch.eye(41)[:1].expand(len(varied), -1))
    assert (varied[..., 0] == varied[:, :1, 0]).all()
    assert not rated & {tuple(pair) for pair in varied[:, 1:].flatten(0, 1).tolist()}
    user = int(x[data.labels == np.bincount(data.labels).argmax()][0, 0, 0])
    drawn = varied[varied[:, 0, 0] == user][:, 1:, 1].flatten()
    counts = drawn.bincount(minlength=160)
    unrated = [i for i in range(160) if (user, i) not in rated]
    expected = len(drawn) / len(unrated)
    assert (counts[unrated] - expected).abs().max() < 5 * expected**0.5


def test_negatives_are_new_each_time_and_by_the_generator_alone(path: Path) -> None:
    data = Ratings(path, "train")
    x, y = whole(data)
    generator = Generator().manual_seed(3)
    torch.manual_seed(1)
    first, again = (data.vary(x, y, generator)[0] for _ in range(2))
    assert first.shape[1] == 5
    assert not torch.equal(first, again)
    torch.manual_seed(2)
    assert torch.equal(data.vary(x, y, Generator().manual_seed(3))[0], first)


def test_users_are_the_labels(path: Path) -> None:
    data = Ratings(path, "train")
    assert data.labels.tolist() == whole(data)[0][:, 0, 0].tolist()
    seen = []
    for g in range(2):
        sampler = Sampler(data, AsRank(g, 2), partition=ByLabel(), labels=data.labels)
        seen.append({int(data.labels[row]) for row in sampler})
    assert len(seen[0] & seen[1]) <= 1


def test_what_cannot_be(path: Path) -> None:
    assert isinstance(open_split(path, "train", {"negatives": 2}), Ratings)
    with pytest.raises(UserError, match="negatives = 0: at least 1 is needed"):
        open_split(path, "train", {"negatives": 0})
    with pytest.raises(UserError, match="no split 'users'; Allowed: test, train"):
        Ratings(path, "users")
    with pytest.raises(UserError, match="a dataset file of ratings, one of images is needed"):
        ImageDataset(path, "train")
    with pytest.raises(UserError, match="a dataset file of ratings, one of tokens is needed"):
        Windows(path, "train")


def test_the_trial_has_all_that_may_come(path: Path) -> None:
    data = Ratings(path, "train")
    assert data.trial().tolist() == [[[0, 0]], [[data.users - 1, data.items - 1]]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_a_damaged_file_is_refused_or_read_right(path: Path, tmp_path: Path, drawn: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    content[drawn.draw(st.integers(0, len(content) - 1))] ^= drawn.draw(st.integers(1, 255))
    broken = tmp_path / "broken.h5"
    broken.write_bytes(content)
    try:
        x, _ = whole(data := Ratings(broken, "test"))
    except UserError as refusal:
        message = str(refusal)
    else:
        message = str(broken)
        right = Ratings(path, "test")
        assert torch.equal(x, whole(right)[0])
        assert np.array_equal(data.header.users, right.header.users)
        assert torch.equal(data._known, right._known)
    assert str(broken) in message
