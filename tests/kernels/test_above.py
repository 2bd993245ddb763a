from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hpcsgd import UserError, kernels
from hpcsgd.kernels import reference

TENTH = float(np.float32(0.1))  # a little more than 0.1
X = [0.0, -0.0, 1e-45, TENTH, -TENTH, 3e38, -math.inf, math.nan]


@pytest.mark.parametrize("above", [kernels.above, reference.above], ids=["native", "reference"])
@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (-1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0.0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1e-45, [2, 3, 4, 5, 6, 7]),
        (1e-60, [2, 3, 4, 5, 6, 7]),
        (0.1, [3, 4, 5, 6, 7]),
        (TENTH, [3, 4, 5, 6, 7]),
        (TENTH + 1e-12, [5, 6, 7]),
        (1e300, [6, 7]),
        (math.inf, [6, 7]),
    ],
)
def test_what_reaches_a_threshold(above, threshold, expected):
    found = above(torch.tensor(X), threshold)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_float64_is_compared_as_such():
    assert kernels.above(torch.tensor([1.0, 1 + 1e-12], dtype=torch.float64), 1 + 1e-13).tolist() == [1]


def test_a_threshold_is_a_number():
    with pytest.raises(UserError, match="NaN"):
        kernels.above(torch.ones(3), math.nan)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 2049, 70_001, 2**20, 2**21 + 35])
@pytest.mark.parametrize("threshold", [0, 1.0, 3.5], ids=["all", "many", "few"])
def test_as_the_reference(everywhere, n, threshold):
    x = torch.from_numpy(np.random.default_rng(n).standard_normal(n + 1, np.float32))[1:]
    expected = reference.above(x, threshold)
    for found in everywhere(lambda library: library.above(x, threshold)):
        assert torch.equal(found, expected)


def test_nothing_is_written_where_there_is_no_room(native):
    x, out = torch.ones(100), torch.full((100,), -1)
    assert native.functions.hpcsgd_above(x.data_ptr(), 100, 0.0, out.data_ptr(), 99, 1, 0) == 100
    assert (out == -1).all()
