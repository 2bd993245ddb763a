"""Fixtures that call the native kernels in every possible way; all ways must give the same results."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hpcsgd import kernels

THREADS = (1, 2, 3)


@pytest.fixture(scope="session")
def native() -> kernels.Native:
    """The native library. Its absence is an error wherever it could have been built."""
    library = kernels.native()
    if library is None:
        if shutil.which("c++") or shutil.which("g++"):
            pytest.fail("csrc/ was not built: pip install -e . does it")
        pytest.skip("no native kernels, and no compiler to build them with")
    return library


@pytest.fixture
def everywhere(native: kernels.Native) -> Iterator[Callable[..., list[Any]]]:
    """A function `everywhere(call)`.

    It returns the results of `call(library)` with the CPU's and with portable instructions, and with several
    numbers of threads.
    """
    before = torch.get_num_threads()

    def run(call: Callable[[kernels.Native], Any], threads: tuple[int, ...] = THREADS) -> list[Any]:
        results = []
        for count in threads:
            torch.set_num_threads(count)
            results += [call(native), call(replace(native, portable=True))]
        return results

    yield run
    torch.set_num_threads(before)
