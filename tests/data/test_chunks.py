from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcsgd.data.chunks import fletcher32, read_rows


@pytest.mark.parametrize("width", [1, 2, 3, 64, 361, 3072, 40_001])
@pytest.mark.parametrize("fill", [None, 0, 255])
def test_checksums_are_those_of_hdf5(tmp_path: Path, width: int, fill: int | None) -> None:
    rows = np.random.default_rng(width).integers(0, 256, (4, width), dtype=np.uint8)
    if fill is not None:
        rows[:] = fill
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        dataset = file.create_dataset("x", data=rows, chunks=(1, width), fletcher32=True)
        stored = [dataset.id.read_direct_chunk((row, 0))[1][-4:] for row in range(4)]
        np.testing.assert_array_equal(read_rows(dataset, [3, 1]), rows[[3, 1]])
    assert fletcher32(rows).astype("<u4").tobytes() == b"".join(stored)
