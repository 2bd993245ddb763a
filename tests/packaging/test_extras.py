"""The environments of the Makefile have each package for want of which a test would be skipped."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
DISTRIBUTIONS: dict[str, str] = {
    "sklearn": "scikit-learn",
    "threadpoolctl": "scikit-learn",  # which needs it
    "hydra_plugins": "hydra-submitit-launcher",
    "mlflow": "mlflow-skinny",
}
"""The distributions of modules whose names differ, or that come with another distribution."""


def packages(*extras: str) -> set[str]:
    """Return the packages that the extras install, also by extras that they name."""
    found: set[str] = set()
    for line in (line for extra in extras for line in PROJECT["optional-dependencies"][extra]):
        name, others = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", line).groups()  # type: ignore[union-attr]
        found |= packages(*others.split(",")) if name == PROJECT["name"] else {name}
    return found


def wanted(code: str) -> Iterator[tuple[str, bool]]:
    """Yield the packages for want of which tests are skipped, and whether only tests marked `long` are."""
    tree = ast.parse(code)
    for part in tree.body:
        marked = isinstance(part, ast.FunctionDef) and any(
            "mark.long" in ast.unparse(each) for each in part.decorator_list
        )
        for call in (node for node in ast.walk(part) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "pytest.importorskip":
                module = str(ast.literal_eval(call.args[0])).partition(".")[0]
                yield DISTRIBUTIONS.get(module, module), marked


def lacking(code: str) -> set[str]:
    """Return the packages that a tier which runs the tests in `code` does not install."""
    usual = packages("examples", "dev")
    of_long_tests = usual | packages("test-long")
    return {name for name, long in wanted(code) if name not in (of_long_tests if long else usual)}


def test_the_makefile_installs_these_extras() -> None:
    assert len(re.findall(r"^\$\(.*ENV\): EXTRAS := .*\bexamples,dev$", MAKEFILE, re.MULTILINE)) == 2
    assert '-c constraints.txt -e ".[test-long]"\n' in MAKEFILE


@pytest.mark.slow
def test_no_test_is_skipped_for_want_of_a_package() -> None:
    found = {
        str(path.relative_to(ROOT)): lacking(path.read_text()) for path in (ROOT / "tests").rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def test_a():\n    pytest.importorskip('trl')", {"trl"}),
        ("@pytest.mark.long\ndef test_a():\n    pytest.importorskip('trl')", set()),
        ("@pytest.mark.long\ndef test_a():\n    pytest.importorskip('horovod.torch')", {"horovod"}),
        ("pytest.importorskip('sklearn.datasets')", set()),
    ],
)
def test_a_lack_is_found(code: str, names: set[str]) -> None:
    assert lacking(code) == names
