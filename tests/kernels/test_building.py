"""setup.py builds csrc/cuda/ without a warning for the GPUs that it names."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

import programs

ROOT = Path(__file__).parents[2]
HOME = os.environ.get("CUDA_HOME")
PATIENCE = 600.0  # seconds; the machine may be busy
NVCC = shutil.which("nvcc", path=f"{HOME}/bin" if HOME else None)


def build(sources: Path, to: Path) -> programs.Done:
    command = [sys.executable, "setup.py", "build_ext", "--strict-cuda", f"--build-lib={to}"]
    return programs.run([*command, f"--build-temp={to}"], cwd=sources, timeout=PATIENCE, check=False)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc" / "cuda", tmp_path / "csrc" / "cuda")
    (tmp_path / "csrc" / "none.cpp").write_text("")  # instead of the files for CPUs
    return tmp_path


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
def test_nvcc_has_nothing_to_complain_of(sources, tmp_path):
    done = build(sources, tmp_path / "built")
    output = done.stdout + done.stderr
    library = tmp_path / "built" / "hpcsgd" / "kernels" / "libhpcsgd_cuda.so"
    assert library.exists(), output
    assert NVCC is not None
    known = programs.run([NVCC, "--list-gpu-code"]).stdout.split()
    for number in {80, 90, 100} & {int(each.removeprefix("sm_")) for each in known if each[3:].isdigit()}:
        assert f"arch=compute_{number},code=sm_{number}" in output
    assert "code=compute_" in output


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.slow
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize(
    "line",
    [
        "static int nobody_calls() { return 1; }",
        "__device__ int forgetful() { int never; return 1; }",
    ],
)
def test_a_warning_is_an_error(sources, tmp_path, line):
    for path in (sources / "csrc" / "cuda").glob("*.cu"):
        path.unlink()
    (sources / "csrc" / "cuda" / "careless.cu").write_text(f"{line}\n")
    assert "careless.cu" in build(sources, tmp_path / "built").stderr
    assert not (tmp_path / "built" / "hpcsgd" / "kernels" / "libhpcsgd_cuda.so").exists()
