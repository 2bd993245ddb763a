"""The command line and the job file accept all commands and files that pages show."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError

import hpcsgd
from hpcsgd.cli import app
from hpcsgd.config import variants
from hpcsgd.config.overrides import overlay
from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import checked
from hpcsgd.cost import machine
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation import scenario
from hpcsgd.train.parts import make_method
from website.pages import PAGES, ROOT, Block, blocks, commands, inline, of_hpcsgd

STEPS_AN_EPOCH = 40
STEPS = 10 * STEPS_AN_EPOCH
SCRIPT = re.compile(r"(benchmarks|examples|jobs)/[\w/-]+\.(py|sh|sbatch)$")
STANDS_FOR = {"gpt.toml": "examples/gpt_wikitext2.toml"}
"""Stand-ins for job files that pages mention but do not contain; digits.toml stands in for all others."""
PACKAGES = ("accelerate", "lightning", "transformers")
"""Packages other than hpcsgd that scripts import; each needs a library of its own."""
HEAD = 'format = 1\n[machine]\nhosts = 2\nranks_per_host = 2\nbackend = "MPICH"\ndate = ""\nversions = {}\n'


class Mistyped(Exception):
    """Raised for a command with a file that does not exist."""


def file_named(path: Path, made: str) -> Path:
    """Return the file in the repository, or a stand-in for a file of the reader or of the page.

    The page makes a file if ``> path`` is in `made`. Raises `Mistyped`.
    """
    if path.parts[0] in ("examples", "jobs", "benchmarks") and f"> {path}" not in made:
        if not (ROOT / path).is_file():
            raise Mistyped(f"{path}: there is no such file")
        return ROOT / path
    return ROOT / STANDS_FOR.get(str(path), "examples/digits.toml")


def require_taken(words: list[str], made: str = "") -> None:
    """Check that `hpcsgd` accepts the arguments; raises `CycloptsError`, `Mistyped` or `UserError`."""
    function, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    given: dict[str, Any] = bound.arguments
    for value in given.values():
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path) and path.suffix == ".toml":
                file_named(path, made)
    if "overrides" not in inspect.signature(function).parameters:
        return
    job = next((value for value in given.values() if isinstance(value, Path)), Path("job.toml"))
    file, typed = file_named(job, made), given.get("overrides", ())
    if function.__module__ == "hpcsgd.cli.simulate":
        scenario.load(file, typed)
    else:
        table = read_toml(file)
        overlay(table, typed)
        require_method(table, file)
    if (compared := given.get("compared")) and not compared.methods.endswith(".toml"):
        for config in variants.configs(file, typed, compared.methods).values():
            make_method(config.method, STEPS_AN_EPOCH, STEPS)


def require_method(table: dict[str, Any], file: Path) -> None:
    make_method(checked(table, file).method, STEPS_AN_EPOCH, STEPS)


def typed(page: Path) -> Iterator[list[str]]:
    for block in blocks(page):
        yield from commands(block)
    yield from inline(page)


def mistyped(page: Path) -> list[str]:
    """Return the commands of a page that are not accepted, with the reasons."""
    wrong = []
    for command in typed(page):
        words = of_hpcsgd(command)
        try:
            for word in filter(SCRIPT.match, command):
                file_named(Path(word), page.read_text())
            if words is not None:
                require_taken(words, page.read_text())
        except (CycloptsError, Mistyped, UserError) as error:
            wrong.append(f"{' '.join(command)}: {error}")
    return wrong


def completed(block: Block) -> dict[str, Any]:
    """Return the job file of the digits, updated with the sections and keys of a block."""
    table = tomllib.loads((ROOT / "examples/digits.toml").read_text())
    for name, section in tomllib.loads(block.text).items():
        whole = name in ("parallel", "lr_schedule") or "name" in section
        table[name] = section if whole else {**table.get(name, {}), **section}
    table["optimizer"].setdefault("lr", 0.1)
    if not table["training"].keys().isdisjoint(("steps", "samples", "tokens")):
        del table["training"]["epochs"]
    return table


TOML = [block for page in PAGES for block in blocks(page) if block.is_toml]
SPECIAL = ("compare.md", "machine.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_taken(page: Path) -> None:
    assert mistyped(page) == []


def test_there_are_many() -> None:
    found = [words for page in PAGES for words in map(of_hpcsgd, typed(page)) if words]
    assert len(found) > 60
    assert {words[0] for words in found} == {name for name in app if not name.startswith("-")}
    assert len(TOML) > 20


@pytest.mark.parametrize("block", [x for x in TOML if x.page not in SPECIAL], ids=lambda x: x.page)
def test_every_piece_of_a_job_file_is_taken(block: Block, tmp_path: Path) -> None:
    require_method(completed(block), tmp_path / "job.toml")


@pytest.mark.parametrize("block", [x for x in TOML if x.page == "machine.md"], ids=lambda x: x.page)
def test_every_machine_file_is_taken(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(block.text if block.text.startswith("format") else HEAD + block.text)
    assert machine.load(file).link


def test_the_file_of_variants_is_taken(tmp_path: Path) -> None:
    (block,) = (x for x in TOML if x.page == "compare.md")
    (tmp_path / "methods.toml").write_text(block.text)
    found = variants.configs(ROOT / "examples/digits.toml", (), str(tmp_path / "methods.toml"))
    assert list(found) == ["one group", "sparse", "as in the job file"]


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in blocks(page) if b.language == "python"], ids=lambda x: x.page
)
def test_python_has_only_names_that_there_are(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("hpcsgd."):
            assert is_there(*name.split(".")[1:]), name


def is_there(*parts: str) -> bool:
    """Return whether the public names, or separately imported packages, lead to an object."""
    found: Any = hpcsgd
    for part in parts:
        if not hasattr(found, part) and part in PACKAGES:
            found = import_module(f"hpcsgd.{part}")
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return False
    return True


def test_a_name_that_is_not_there_is_found() -> None:
    assert is_there("init")
    assert is_there("quantizers", "int8")
    assert is_there("transformers", "Trainer")
    assert not is_there("transformer")
    assert not is_there("transformers", "Trainr")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("hpcsgd train examples/lost.toml", "no such file"),
        ("hpcsgd train job.toml --training.epoch 3", "did you mean 'epochs'"),
        ("hpcsgd train job.toml --method.name hierachical", "did you mean 'hierarchical'"),
        ("hpcsgd job train job.toml --node 2", "node"),
        ("hpcsgd export", "RUN"),
        ("mpiexec -n 2 hpcsgd compare job.toml --methods 'bsp, sgq'", "did you mean 'sgp'"),
        ("python benchmarks/lost.py", "benchmarks/lost.py"),
        ("hpcsgd simulate examples/simulation.toml --jobs.groups 4", "jobs"),
    ],
)
def test_a_mistyped_command_is_found(tmp_path: Path, line: str, why: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"So:\n\n    {line}\n\nand on.\n")
    (wrong,) = mistyped(page)
    assert why in wrong


def test_blocks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n\n    hpcsgd report runs/a \\\n      --to b.html   # so\n\n"
        "b\n\n```sh\nmpiexec -n 2 hpcsgd doctor\n```\n\n"
        "    [model]\n    name = 'cnn'\n\nc `hpcsgd report runs/b`, `hpcsgd report RUN…`\n"
    )
    assert [(x.language, x.is_toml) for x in blocks(page)] == [("sh", False), ("", False), ("", True)]
    assert list(map(of_hpcsgd, typed(page))) == [
        ["doctor"],
        ["report", "runs/a", "--to", "b.html"],
        ["report", "runs/b"],
    ]
