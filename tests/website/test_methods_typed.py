"""The commands on pages about methods work as written, with a job file for the digits as the reader's own."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import programs
from hpcsgd.data import convert
from website.pages import ROOT, blocks

PATIENCE = 900.0  # seconds; the machine may be busy
pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("sklearn")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/digits.toml").write_text((ROOT / "examples/digits.toml").read_text())
    convert("digits", None, tmp_path / "examples/digits.h5")
    return tmp_path


def write_job(folder: Path, method: dict[str, Any], groups: int) -> None:
    table = tomllib.loads((folder / "examples/digits.toml").read_text())
    table["data"]["path"] = "examples/digits.h5"
    table["parallel"]["groups"] = groups
    table["training"]["epochs"] = 2
    (folder / "job.toml").write_text(tomli_w.dumps(table | {"method": method}))


def typed(page: str, starts: tuple[str, ...], folder: Path) -> str:
    """Run the lines of a page that begin with `starts`, and return what they print."""
    text = "\n".join(block.text for block in blocks(ROOT / "docs" / page) if not block.is_toml)
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euc", "\n".join(lines)]
    assert len(lines) > 1
    return programs.run(command, cwd=folder, env={**os.environ, "PATH": path}, timeout=PATIENCE).stdout


def test_selsync(folder: Path) -> None:
    write_job(folder, {"name": "selsync", "delta": 0.3}, groups=4)
    said = typed("selsync.md", ("mpiexec", "sed"), folder)
    assert "LSSR" in said
    assert (folder / "runs/digits-selsync/model.pt").exists()
