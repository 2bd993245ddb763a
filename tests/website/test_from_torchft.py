"""The page for users of torchft: its script runs on four ranks, and the names in its tables exist."""

from __future__ import annotations

import functools
import re
from importlib import import_module
from pathlib import Path

import pytest

import hpcsgd
import programs
from pythons import python

PAGE = (Path(__file__).parents[2] / "docs/from-torchft.md").read_text()
SCRIPT = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
HOMES = ("", ".manager", ".local_sgd", ".checkpointing")
"""Modules of torchft in which the page's classes may be defined."""


@pytest.mark.slow
def test_the_script_runs(tmp_path: Path) -> None:
    (script,) = SCRIPT.findall(PAGE)
    (tmp_path / "train.py").write_text(script)
    done = programs.run([programs.mpiexec(), "-n", "4", *python("train.py")], cwd=tmp_path)
    assert done.stdout == "4 steps\n"  # 256 samples, 4 × 16 per step


def test_our_names_exist() -> None:
    names = set(re.findall(r"\bhpcsgd((?:\.\w+)+)\(", PAGE))
    assert len(names) > 8
    for name in names:
        functools.reduce(getattr, name[1:].split("."), hpcsgd)
    topology = set(re.findall(r"`topology\.(\w+)`", PAGE))
    assert topology >= {"num_groups", "group_index"}
    assert topology <= {*vars(hpcsgd.Topology), *hpcsgd.Topology.__dataclass_fields__}


@pytest.mark.long
def test_theirs_exist() -> None:
    pytest.importorskip("torchft")
    modules = [import_module(f"torchft{home}") for home in HOMES]
    table = PAGE.split("| torchft | a script")[1]
    classes = set(re.findall(r"\b(?:[A-Z][A-Za-z]+SGD|[A-Z]\w+)\(", " ".join(first_column(table))))
    assert {"Manager(", "LocalSGD(", "DiLoCo("} <= classes
    assert [name for name in classes if not any(hasattr(module, name[:-1]) for module in modules)] == []
    manager = import_module("torchft.manager").Manager
    for name in set(re.findall(r"`manager\.(\w+)", table)):
        assert hasattr(manager, name)


def first_column(table: str) -> list[str]:
    return re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
