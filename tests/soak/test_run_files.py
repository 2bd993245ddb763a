"""Damaged files of a run: each command that reads them succeeds or fails with one line."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from soak.conftest import Seeds
from soak.run_files import NOT_READ, READERS, Case, prepared
from soak.sizes import cases
from train.interruptions import Never


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        without_signals(patch)
        prepared(folder)
    return folder


def without_signals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.import_module("hpcsgd.train.run"), "Stopping", Never)


def files_in(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in NOT_READ)
    return sorted(str(path.relative_to(folder)) for path in found)


@pytest.fixture
def desk(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to copy the files to, on a machine without a scheduler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    without_signals(monkeypatch)
    return tmp_path


def anew(desk: Path, made: Path) -> None:
    for path in desk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(made, desk, dirs_exist_ok=True)


@pytest.mark.slow
@cases(some=10, every=300)
def test_damage_is_one_line(desk: Path, made: Path, seeds: Seeds, cases: int) -> None:
    files = files_in(made)

    def case(seed: int) -> None:
        anew(desk, made)
        drawn = Case.drawn(seed, files)
        drawn.put()
        drawn.reader().require_one_line()

    seeds.each(cases, case)


@pytest.mark.slow
def test_whole_files_are_taken(desk: Path, made: Path) -> None:
    """The undamaged files must be accepted; otherwise every command could fail for another reason."""
    for readers in READERS.values():
        for reader in readers:
            anew(desk, made)
            told = reader()
            assert told.code == 0, told
