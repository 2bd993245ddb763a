"""The choice of the implementation, and wheels: the library works with any Python, or is left out."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import programs
from hpcsgd import kernels
from hpcsgd.kernels import Native

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh():
    """Clear the cache of `kernels.native` before and after the test."""
    kernels.native.cache_clear()
    yield
    kernels.native.cache_clear()


def missing(path: Path) -> type[Native]:
    class Missing:
        @staticmethod
        def load() -> Native:
            return Native.load(path)

    return Missing  # pyright: ignore[reportReturnType]


def test_it_tells_what_serves(native):
    assert native.path.exists()
    assert native.instructions in ("avx2", "portable")
    assert str(native) == f"native, {native.instructions}, libhpcsgd_cpu.so"
    assert replace(native, portable=True).instructions == "portable"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is x86-64's")
def test_this_cpus_instructions_are_used(native):
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    has = {"avx2", "fma", "f16c"} <= set(flags.split())
    assert native.instructions == ("avx2" if has else "portable")


def test_without_a_library_the_reference_serves_and_says_so_once(fresh, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(kernels, "Native", missing(tmp_path / "none.so"))
    segments = (torch.tensor([0]), torch.tensor([3]), torch.tensor([1]))
    for _ in range(2):
        assert kernels.native() is None
        assert kernels.largest(torch.tensor([1.0, 3, 2]), *segments).tolist() == [1]
    assert kernels.encode(torch.tensor([1, 3])).tolist() == [1, 1]
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "no native kernels" in record.message
    assert "none.so" in record.message


def test_a_library_of_another_version_is_refused(native, monkeypatch):
    module = importlib.import_module("hpcsgd.kernels.native")  # the package has a function of this name
    monkeypatch.setitem(module._SIGNATURES, "of_tomorrow", [])
    with pytest.raises(OSError, match="another version"):
        Native.load(native.path)


def test_float32_goes_to_the_library_and_float64_does_not(native, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the reference was called")

    for name in ("accumulate", "largest", "above", "encode", "decode"):
        monkeypatch.setattr(f"hpcsgd.kernels.reference.{name}", refuse)
    segments = (torch.tensor([0]), torch.tensor([2]), torch.tensor([1]))
    kernels.accumulate(torch.ones(2), torch.ones(2), torch.tensor([0, 2]))
    kernels.largest(torch.ones(2), *segments)
    kernels.above(torch.ones(2), 1)
    kernels.decode(kernels.encode(torch.tensor([1, 3])), 2)
    with pytest.raises(AssertionError, match="reference was called"):
        kernels.largest(torch.ones(2, dtype=torch.float64), *segments)


@pytest.mark.slow
def test_a_wheel_is_for_any_python_and_needs_no_compiler(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copytree(
        ROOT / "hpcsgd/kernels", tmp_path / "hpcsgd/kernels", ignore=shutil.ignore_patterns("*.so")
    )
    shutil.copy(ROOT / "hpcsgd/errors.py", tmp_path / "hpcsgd/__init__.py")
    nothing = {"CC": "no-compiler", "CXX": "no-compiler", "CUDA_HOME": "no-toolkit"}
    programs.run([sys.executable, "setup.py", "bdist_wheel"], cwd=tmp_path, env={**os.environ, **nothing})
    [wheel] = (tmp_path / "dist").glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "hpcsgd/kernels/reference.py" in names
    assert not [name for name in names if name.endswith(".so")]
