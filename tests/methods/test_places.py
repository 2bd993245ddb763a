"""A method is added in four places: its file, an import, an entry of the tests' table, and CHANGELOG.

All other lists of methods are generated from these.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcsgd
from hpcsgd.cli.citing.bibtex import entries
from hpcsgd.cli.citing.uses import USES
from hpcsgd.errors import UserError
from hpcsgd.methods import METHODS, delayed
from hpcsgd.methods.registry import DELAYABLE, PAPERS
from hpcsgd.train.families import FAMILIES
from methods.table import EXCEPTIONS, REFERENCES

ROOT = Path(__file__).parents[2]
ADDED = "noloco"
"""A method that no other method is based on, and that no example uses."""
IMPORT = "hpcsgd/methods/__init__.py"
"""The import that also makes a method public: `hpcsgd/__init__.pyi` takes all names from there."""
PLACES = {f"hpcsgd/methods/{ADDED}.py", IMPORT, "tests/methods/table.py", "CHANGELOG.md"}
OF_ITS_OWN = {f"tests/methods/test_{ADDED}.py", "tests/methods/test_places.py", "hpcsgd/renamed.py"}
"""The tests of its equations that go beyond the table, this file, and the list of old names."""
EXAMPLES = {
    "benchmarks/simulation_speed.py", "tests/core/test_state.py", "tests/engine/test_group_model.py",
    "tests/engine/test_plan.py", "tests/performance/planning/test_scenario.py",
    "tests/performance/simulation/test_scenario.py",
}  # fmt: skip
"""Files that use it as the only example of a method whose groups wait in pairs.

None of them requires that every method is listed.
"""
FOLDERS = ("hpcsgd", "website", "examples", "benchmarks", "jobs", "packaging", "tests")
TEXTS = (".py", ".pyi", ".md", ".toml", ".yml", ".bib", ".json", ".cff", ".sh", ".sbatch")


def _texts() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.suffix in TEXTS)
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS and path.is_file())


def _naming(name: str) -> set[str]:
    word = re.compile(rf"\b{name}\b")
    found = (path.relative_to(ROOT).as_posix() for path in _texts() if word.search(path.read_text()))
    return {path for path in found if not path.startswith("website/build")}


def test_a_method_is_in_four_places() -> None:
    assert _naming(ADDED) - OF_ITS_OWN - EXAMPLES == PLACES


@pytest.mark.parametrize("name", ["adacomm", "des_loc", "fedavg", "post_local"])
def test_others_are_named_by_methods_alone(name: str) -> None:
    """The exceptions are descriptions of one method by another."""
    package = {path for path in _naming(name) - OF_ITS_OWN if path.startswith(("hpcsgd/", "website/"))}
    assert all(path.startswith("hpcsgd/methods/") for path in package)


def test_all_lists_are_made_from_the_imports() -> None:
    body = ast.parse((ROOT / IMPORT).read_text()).body
    imported = {alias.asname for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported - {None} == {*METHODS, "Method"}
    assert list(METHODS) == sorted(METHODS)
    assert all(getattr(hpcsgd, name) is method for name, method in METHODS.items())
    assert set(METHODS) <= set(hpcsgd.__all__)
    assert METHODS in FAMILIES.values()
    papers = next(papers for table, papers in USES if table is METHODS)
    assert papers.keys() == METHODS.keys() == PAPERS.keys()
    assert all(key in entries() for keys in papers.values() for key in keys)
    assert {case.method for case in [*REFERENCES.values(), *EXCEPTIONS.values()]} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_what_can_be_delayed_says_so(name: str) -> None:
    cases = [case for case in [*REFERENCES.values(), *EXCEPTIONS.values()] if case.method == name]

    def can_be(late: hpcsgd.Method) -> bool:
        try:
            return delayed(late, 1) is not late
        except UserError:
            return False

    assert any(can_be(case.new()) for case in cases) == (name in DELAYABLE)


def test_a_refusal_lists_what_can_be_delayed() -> None:
    with pytest.raises(UserError, match=rf"Expected one of adacomm, .*, {ADDED}, selsync, sparseloco, with"):
        delayed(hpcsgd.sgp(), 1)
