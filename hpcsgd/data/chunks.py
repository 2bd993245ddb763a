"""Fast reading of single rows of an HDF5 dataset, with verified checksums.

HDF5's own row selection costs 0.1 to 0.3 ms per row. Here each row is stored as a separate chunk, which is
read unprocessed: the row's bytes and their Fletcher-32 checksum. The checksums of a whole batch are computed
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import h5py
import numpy as np
from numpy.typing import NDArray

CHECKSUM_BYTES = 4
MODULUS = 65535


class DamagedRowsError(Exception):
    """The error if some rows, `rows`, cannot be read or do not match their checksums."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"damaged rows: {list(rows)}")
        self.rows = list(rows)


def read_rows(dataset: h5py.Dataset, rows: Sequence[int]) -> NDArray[np.uint8]:
    """Return the `rows` of a dataset [n, ...] with one chunk per row, as bytes: uint8 [len(rows), bytes].

    The result is read-only. Raises `DamagedRowsError` if rows cannot be read or do not match their checksums.
    """
    width = prod(dataset.shape[1:]) * dataset.dtype.itemsize + CHECKSUM_BYTES
    source, inner = dataset.id, (0,) * (dataset.ndim - 1)
    chunks = b"".join(_chunk(source, (row, *inner), width) for row in rows)
    stored = np.frombuffer(chunks, np.uint8).reshape(len(rows), width)
    payload, checksums = stored[:, :-CHECKSUM_BYTES], stored[:, -CHECKSUM_BYTES:].copy().view("<u4")[:, 0]
    wrong = np.flatnonzero(fletcher32(payload) != checksums)
    if len(wrong):
        raise DamagedRowsError([rows[i] for i in wrong.tolist()])
    return payload


def _chunk(source: h5py.h5d.DatasetID, place: tuple[int, ...], width: int) -> bytes:
    try:
        skipped_filters, stored = source.read_direct_chunk(place)
    except (OSError, RuntimeError, MemoryError) as error:  # a chunk never written may have any size
        raise DamagedRowsError(place[:1]) from error
    if skipped_filters or len(stored) != width:
        raise DamagedRowsError(place[:1])
    return stored


def fletcher32(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the checksums that HDF5's filter of this name computes for `rows` [b, bytes]: uint32 [b].

    The words w_1 … w_n are the row's big-endian 16-bit numbers. The checksum has Σ w_i in its lower half and
    Σ (n + 1 - i) w_i in its upper half, both modulo 65535, with 65535 in place of 0 unless all words are 0.
    """
    odd = rows.shape[1] % 2
    words = np.pad(rows, ((0, 0), (0, odd))).view(">u2") if odd else np.ascontiguousarray(rows).view(">u2")
    sums = words.astype(np.float64) @ _weights(words.shape[1])
    folded = np.where(sums > 0, (sums - 1) % MODULUS + 1, 0).astype(np.uint32)
    return folded[:, 0] | (folded[:, 1] << np.uint32(16))


@cache
def _weights(words: int) -> NDArray[np.float64]:
    """Return the factors of the words in the two sums of `fletcher32`, float64 [words, 2].

    The sums stay below 2^53, so they are exact in float64, which is fast.
    """
    falling = np.arange(words, 0, -1) % MODULUS
    return np.stack([np.ones_like(falling), falling], axis=1).astype(np.float64)
