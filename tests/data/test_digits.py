from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcsgd.data import convert
from hpcsgd.errors import UserError


@pytest.mark.slow
def test_every_digit_is_in_one_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    summary = convert("digits", None, tmp_path / "digits.h5")
    assert summary.rows == {"train": 1442, "test": 355}
    with h5py.File(tmp_path / "digits.h5") as file:
        stored = np.concatenate(
            [np.asarray(file[f"{split}/x"]).reshape(-1, 64) for split in ("train", "test")]
        )
        test_labels = np.asarray(file["test/y"])
    whole = datasets.load_digits().data.astype(np.uint8)
    assert sorted(map(bytes, stored)) == sorted(map(bytes, whole))
    assert np.ptp(np.bincount(test_labels)) <= 2
    assert summary.header.scale == 16


def test_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"hpcsgd\[examples\]"):
        convert("digits", None, tmp_path / "digits.h5")
