"""Functions take the sections of a job file that they use, not the whole `Config`.

If a function reads only one section, it takes that section. Its signature then says what it depends on, and
a test of it needs no job file.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FREE = "config/"


def takers(root: Path) -> list[str]:
    """Return the functions that take a whole `Config` and read one section of it."""
    return [
        f"{path.relative_to(root / 'hpcsgd')}: {function.name} takes all of `{name}` for its {section}"
        for path in sorted((root / "hpcsgd").rglob("*.py"))
        if not str(path.relative_to(root / "hpcsgd")).startswith(FREE)
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for name in _configs(function)
        if (section := _only_section(function, name)) is not None
    ]


def _configs(function: ast.FunctionDef) -> list[str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [x.arg for x in arguments if x.annotation is not None and ast.unparse(x.annotation) == "Config"]


def _only_section(function: ast.FunctionDef, name: str) -> str | None:
    """Return the section of the argument `name` if the function uses one section of it and nothing else."""
    nodes = list(ast.walk(function))
    uses = sum(isinstance(x, ast.Name) and x.id == name for x in nodes)
    read = [
        x.attr
        for x in nodes
        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == name
    ]
    return read[0] if len(read) == uses and len(set(read)) == 1 else None


@pytest.mark.slow
def test_who_reads_one_section_is_given_that() -> None:
    assert takers(ROOT) == []


def test_who_is_given_more_is_found(tmp_path: Path) -> None:
    files = {
        "a.py": "def one(config: Config):\n  return config.data.path, config.data.num_workers\n",
        "b.py": "def two(config: Config):\n  return config.data, config.model\n"
        "def on(config: Config):\n  one(config)\n  return config.data\n"
        "def section(data: DataSection):\n  return data.path\n",
        "config/c.py": "def one(config: Config):\n  return config.data\n",
    }
    for name, text in files.items():
        path = tmp_path / "hpcsgd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert takers(tmp_path) == ["a.py: one takes all of `config` for its data"]
