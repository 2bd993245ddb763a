"""The recipes of packaging/ have the requirements of pyproject.toml, and its version."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["mpi"]]
"""The requirements of recipes, which use the MPI of a site."""
CONDA = PACKAGING / "conda-forge" / "recipe.yaml"
SPACK = PACKAGING / "spack" / "spack_repo" / "hpcsgd" / "packages" / "py_hpcsgd" / "package.py"
EASYBUILD = next((PACKAGING / "easybuild").glob("*.eb"))
APPTAINER = PACKAGING / "apptainer" / "hpcsgd.def"
# Packages that EasyBuild has in bundles, and packages that have another name in conda.
BUNDLED = {"rich": "Python-bundle-PyPI", "tomli-w": "Python-bundle-PyPI"}
BUNDLED |= {"numpy": "SciPy-bundle", "scipy": "SciPy-bundle", "torch": "PyTorch"}
CONDAS = {"pytorch": "torch", "matplotlib-base": "matplotlib"}

Bounds = dict[str, tuple[str, str | None]]


def bounds(lines: list[str]) -> Bounds:
    """Return the least version of each package, and the first version that is too new."""
    parts = [re.fullmatch(r"([\w-]+) ?>=([\d.]+)(?:,<([\d.]+))?", line) for line in lines]
    assert all(parts), lines
    return {part[1]: (part[2], part[3]) for part in parts if part}


def of_conda(text: str) -> tuple[str, Bounds]:
    recipe = yaml.safe_load(text)
    asked = bounds([line for line in recipe["requirements"]["run"] if line != "python"])
    return recipe["context"]["version"], {CONDAS.get(name, name): each for name, each in asked.items()}


def calls(text: str, name: str) -> list[ast.Call]:
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [node for node in found if isinstance(node.func, ast.Name) and node.func.id == name]


def of_spack(text: str) -> tuple[str, Bounds]:
    """Return the version and the bounds. In Spack a newest version of 2 includes all versions below 3."""
    specs = [ast.literal_eval(call.args[0]) for call in calls(text, "depends_on")]
    found = [re.fullmatch(r"py-([\w-]+)@([\d.]+):(\d*)", spec) for spec in specs]
    asked = {part[1]: (part[2], str(int(part[3]) + 1) if part[3] else None) for part in found if part}
    del asked["setuptools"]
    return ast.literal_eval(calls(text, "version")[0].args[0]), asked


def of_easybuild(text: str) -> tuple[str, dict[str, Any]]:
    values: dict[str, Any] = {}
    for line in ast.parse(text).body:
        assert isinstance(line, ast.Assign)
        assert isinstance(line.targets[0], ast.Name)
        if line.targets[0].id in ("version", "dependencies"):
            values[line.targets[0].id] = ast.literal_eval(line.value)
    extensions = re.findall(r"^    \('([\w-]+)', '([\d.]+)'", text.split("exts_list")[1], re.MULTILINE)
    return values["version"], dict(values["dependencies"]) | dict(extensions)


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def lacking(project: Bounds, given: dict[str, Any]) -> list[str]:
    """Return the packages that EasyBuild lacks or has in a wrong version.

    The versions of bundles are not compared, because bundles have versions of their own.
    """
    wrong = []
    for name, (least, below) in project.items():
        version = given.get(BUNDLED.get(name, name))
        bundled = str(BUNDLED.get(name)).endswith(("-bundle", "-bundle-PyPI"))
        if version is None or not (bundled or number(least) <= number(version) < number(below or "9999")):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("path", "read"), [(CONDA, of_conda), (SPACK, of_spack)])
def test_recipes_ask_for_the_same(path, read):
    assert read(path.read_text()) == (PROJECT["version"], bounds(ASKED))


@pytest.mark.parametrize(
    ("path", "read", "was", "other"),
    [
        (CONDA, of_conda, "    - scipy >=1.11\n", ""),
        (CONDA, of_conda, "h5py >=3.10", "h5py >=3.9"),
        (CONDA, of_conda, '"0.1.0"', '"0.0.9"'),
        (SPACK, of_spack, "py-torch@2.4:2", "py-torch@2.4:"),
        (SPACK, of_spack, "py-rich@13:", "py-rich@12:"),
        (SPACK, of_spack, 'version("0.1.0"', 'version("0.0.9"'),
    ],
)
def test_drift_is_found(path, read, was, other):
    text = path.read_text()
    assert was in text
    drifted = read(text.replace(was, other))
    assert drifted != (PROJECT["version"], bounds(ASKED))


def test_easybuild_has_what_will_do():
    version, given = of_easybuild(EASYBUILD.read_text())
    assert version == PROJECT["version"]
    assert lacking(bounds(ASKED), given) == []
    assert EASYBUILD.name == f"hpcsgd-{version}-foss-2025b.eb"


@pytest.mark.parametrize(
    ("was", "other", "lost"),
    [
        ("('mpi4py', '4.1.0')", "('mpi4py', '3.1.0')", "mpi4py"),
        ("('PyTorch', '2.9.1')", "('PyTorch', '3.0')", "torch"),
        ("('cyclopts', ", "('argparse', ", "cyclopts"),
    ],
)
def test_what_will_not_do_is_found(was, other, lost):
    text = EASYBUILD.read_text()
    assert was in text
    _, given = of_easybuild(text.replace(was, other))
    assert lacking(bounds(ASKED), given) == [lost]


def test_other_recipes_have_the_version():
    assert f"hpcsgd-{PROJECT['version']}-" in APPTAINER.read_text()
    assert f"Version {PROJECT['version']}\n" in APPTAINER.read_text()
    assert f"hpcsgd-{PROJECT['version']}.tar.gz" in SPACK.read_text()


def test_every_python_least_is_the_projects():
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f'depends_on("python@{least}:"' in SPACK.read_text()
