"""The distributions can be built, and used without the repository, with packages from a registry."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import programs

ROOT = Path(__file__).parents[2]
PATIENCE = 5400.0  # seconds
pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]

SERVES = """
import logging, torch
from hpcsgd import kernels
assert kernels.native() is None
zero, three, one = (torch.tensor([each]) for each in (0, 3, 1))
assert kernels.largest(torch.tensor([1.0, 3, 2]), zero, three, one).tolist() == [1]
"""


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = programs.run(command, cwd=cwd, env=env, timeout=PATIENCE)
    return done.stdout + done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone of the repository, as a fresh machine gets it."""
    run("git", "clone", "-q", ROOT, tmp_path / "clone")
    return tmp_path / "clone"


def test_make_wheels(clone):
    output = run("make", "wheels", f"PYTHON={sys.executable}", cwd=clone)
    (wheel,) = (clone / "dist").glob("*.whl")
    assert "manylinux_2_28" in wheel.name
    assert "selects as the reference" in output
    assert "trains: loss" in output
    assert "kernels as numpy" in output
    pythons = re.findall(r"^tried on Python (\S+): training by torchrun", output, re.MULTILINE)
    assert pythons
    assert output.count("2 ranks by gloo: torchrun started them") == len(pythons)
    assert output.count("one averaged model on 2 ranks") == len(pythons)


def test_the_source_distribution_needs_no_compiler(clone, tmp_path):
    """Without g++ and nvcc in PATH, pip installs hpcsgd, which reports that it has no native kernels."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python, path = environment / "bin" / "python", {**os.environ, "PATH": str(environment / "bin")}
    path = {name: path[name] for name in path if name not in ("CC", "CXX", "CUDA_HOME", "PYTHONPATH")}
    run(python, "-m", "pip", "install", "-q", "setuptools>=77", "wheel")
    run(python, "-c", "from setuptools.build_meta import build_sdist; build_sdist('.')", cwd=clone)
    (sdist,) = clone.glob("hpcsgd-*.tar.gz")
    run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", sdist, env=path, cwd=tmp_path)
    (packages,) = environment.glob("lib/python*/site-packages")
    assert (packages / "hpcsgd" / "kernels").is_dir()
    assert not list(packages.glob("hpcsgd/kernels/*.so"))
    # Torch and the other packages are those of the tests' own environment.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    output = run(python, "-P", "-c", SERVES, env=path, cwd=tmp_path)
    assert "no native kernels" in output
