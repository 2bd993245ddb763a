from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from data.originals import write_wikitext
from hpcsgd.data import ImageDataset, Ratings, Windows, convert, open_split
from hpcsgd.data.formats import wikitext
from hpcsgd.data.windows import IGNORED
from hpcsgd.errors import UserError

LINES = {"train": 400, "valid": 160, "test": 5}  # 2800, 1120 and 35 tokens, each in one shard


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    convert("wikitext", write_wikitext(folder / "words", LINES), folder / "store.h5")
    return folder / "store.h5"


def tokens(path: Path, split: str) -> list[int]:
    return wikitext.read(path.parent / "words").tokens[split].tolist()


@pytest.mark.parametrize("bptt", [1, 6, 35, 1023, 1024, 2000, 2799])
def test_windows_of_the_training_text(path: Path, bptt: int) -> None:
    data, text = Windows(path, "train", bptt), tokens(path, "train")
    assert len(data) == 2799 // bptt
    rows = list(range(len(data)))[::-1]
    batch = data.__getitems__(rows)
    assert (batch.x.dtype, batch.y.dtype) == (torch.int64, torch.int64)
    assert batch.x.tolist() == [text[i * bptt : i * bptt + bptt] for i in rows]
    assert batch.y.tolist() == [text[i * bptt + 1 : i * bptt + bptt + 1] for i in rows]


@pytest.mark.parametrize("bptt", [1, 7, 34, 35, 36, 1000])
def test_every_token_but_the_first_is_asked_for_once(path: Path, bptt: int) -> None:
    data, text = Windows(path, "valid", bptt), tokens(path, "valid")
    batch = data.__getitems__(range(len(data)))
    asked = batch.y != IGNORED
    assert batch.y[asked].tolist() == text[1:]
    last = len(text) - 1 - bptt
    assert batch.x[-1].tolist() == text[last:-1]
    assert batch.y[-1][asked[-1]].tolist() == text[last + 1 :][-int(asked[-1].sum()) :]
    assert asked[:-1].all()


def test_through_a_loader(path: Path) -> None:
    data = Windows(path, "train")
    data[0]
    whole = data.__getitems__(range(len(data)))
    for workers in (0, 1):
        batches = list(DataLoader(data, 7, num_workers=workers, collate_fn=data.collate))
        assert torch.equal(torch.cat([x for x, _ in batches]), whole.x)
        assert torch.equal(torch.cat([y for _, y in batches]), whole.y)
    assert torch.equal(pickle.loads(pickle.dumps(data))[3][0], whole.x[3])


def test_what_cannot_be(path: Path) -> None:
    with pytest.raises(UserError, match="bptt = 0: a window has at least 1 token"):
        Windows(path, "train", 0)
    with pytest.raises(UserError, match=r"bptt = 35: the 35 tokens of split 'test' of .* are too few"):
        Windows(path, "test")
    with pytest.raises(UserError, match="no split 'words'; Allowed: test, train, valid"):
        Windows(path, "words")
    with pytest.raises(IndexError, match=r"79 samples, none at .79"):
        Windows(path, "train").__getitems__([79])
    with pytest.raises(UserError, match="a dataset file of tokens, one of images is needed"):
        ImageDataset(path, "train")
    with pytest.raises(UserError, match="a dataset file of tokens, one of ratings is needed"):
        Ratings(path, "train")


def test_opened_by_what_it_is(path: Path) -> None:
    found = open_split(path, "train", {"bptt": 5})
    assert isinstance(found, Windows)
    assert found.bptt == 5
    assert found.labels is None
    with pytest.raises(UserError, match="Windows has no argument 'bppt'; did you mean 'bptt'"):
        open_split(path, "train", {"bppt": 5})


def test_the_trial_has_all_that_may_come(path: Path) -> None:
    data = Windows(path, "train")
    assert data.trial().shape == (2, 35)
    assert data.trial().unique().tolist() == [0, data.types - 1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_a_damaged_file_is_refused_or_read_right(path: Path, tmp_path: Path, drawn: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    content[drawn.draw(st.integers(0, len(content) - 1))] ^= drawn.draw(st.integers(1, 255))
    broken = tmp_path / "broken.h5"
    broken.write_bytes(content)
    whole = Windows(path, "train")
    try:
        data = Windows(broken, "train")
        batch = data.__getitems__(range(len(data)))
    except UserError as refusal:
        message = str(refusal)
    else:
        message = str(broken)
        assert data.header == whole.header
        assert np.array_equal(batch.x, whole.__getitems__(range(len(whole))).x)
    assert str(broken) in message
