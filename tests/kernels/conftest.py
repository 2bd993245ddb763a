"""Every way in which the native kernels can be called; results may not depend on it."""

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
    """The library; where it could have been built, it must have been."""
    library = kernels.native()
    if library is None:
        if shutil.which("c++") or shutil.which("g++"):
            pytest.fail("csrc/ was not built: pip install -e . does it")
        pytest.skip("no native kernels, and no compiler to build them with")
    return library


@pytest.fixture
def everywhere(native: kernels.Native) -> Iterator[Callable[..., list[Any]]]:
    """`everywhere(call)`: what `call(library)` returns with any instructions and any number of threads."""
    before = torch.get_num_threads()

    def run(call: Callable[[kernels.Native], Any], threads: tuple[int, ...] = THREADS) -> list[Any]:
        results = []
        for count in threads:
            torch.set_num_threads(count)
            results += [call(native), call(replace(native, portable=True))]
        return results

    yield run
    torch.set_num_threads(before)
