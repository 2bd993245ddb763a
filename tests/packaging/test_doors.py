"""The pages that begin with an installation are followed as written, each in a fresh clone of the repository.

The commands of such a page make its environment and start its scripts. Packages come from a registry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import programs
from train.launches import unlaunched

ROOT = Path(__file__).parents[2]
PATIENCE = 1800.0  # seconds; an environment alone takes minutes
pytestmark = [pytest.mark.long, pytest.mark.timeout(PATIENCE + 100)]
SECTION = re.compile(r"^#+ (.*)\n", re.MULTILINE)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ACTIVATE = "python3 -m venv .venv\n. .venv/bin/activate\n"
HELD = ("HOME", "TMPDIR", "LANG", "http_proxy", "https_proxy", "no_proxy")
"""Variables that the commands get from the tests, in addition to those of pip and of MPI."""


def found(page: str) -> Iterator[tuple[str, str]]:
    """Yield the title and the commands of each block that installs a checkout."""
    _, *parts = SECTION.split((ROOT / "docs" / page).read_text())
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        for language, code in BLOCK.findall(text):
            if language == "sh" and code.startswith("pip install -e "):
                yield title, code


def snakefile(folder: Path) -> None:
    (rule,) = re.findall(r"^```snakemake\n(.*?)^```", page("workflows.md"), re.MULTILINE | re.DOTALL)
    (folder / "Snakefile").write_text(rule)


def notebook(folder: Path) -> None:
    """Write a notebook with the script of the page about torchft, each paragraph in a cell."""
    (script,) = re.findall(r"^```python\n(.*?)^```", page("from-torchft.md"), re.MULTILINE | re.DOTALL)
    cells = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": str(i),
            "metadata": {},
            "outputs": [],
            "source": x,
        }
        for i, x in enumerate(script.split("\n", 7))
    ]
    written = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "notebook.ipynb").write_text(json.dumps(written))


def nothing(_: Path) -> None:
    pass


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@dataclass(frozen=True)
class Door:
    """What the commands of a page print, and what the page has its reader write before."""

    prints: tuple[str, ...]
    writes: Callable[[Path], None] = nothing


DOORS = {
    ("torchrun.md", "By torchrun, without MPI"): Door(
        ("test accuracy 0.9", r"trained .*\n(.*\n)*.*accuracy 0.9")
    ),
    ("lightning.md", "Lightning"): Door((r"110 steps: accuracy of the averaged model 0\.[89]",)),
    ("transformers.md", "Hugging Face: Trainer and Accelerate"): Door(
        (r"evaluation loss 0\.", r"accuracy 0\.[89]")
    ),
    ("from-ddp.md", "Coming from DDP"): Door((r"(epoch 4: accuracy 0\.[89](.*\n)*.*){2}",)),
    ("workflows.md", "Hydra with submitit"): Door(
        (r"lr 0\.1: loss \d\.\d+ on 2 × 2 ranks", r"lr 0\.05: loss \d\.\d+ on 2 × 2 ranks")
    ),
    ("workflows.md", "Snakemake"): Door((r"1 of 1 steps \(100%\) done",), snakefile),
    ("workflows.md", "A notebook that becomes a job"): Door((r"^4 steps$",), notebook),
}


def test_these_are_all() -> None:
    names = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert {(name, title) for name in names for title, _ in found(name)} == DOORS.keys()


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """Return a clone of the repository; it is removed after the test, as its environment takes gigabytes."""
    programs.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")])
    yield tmp_path / "clone"
    shutil.rmtree(tmp_path / "clone")


def environment() -> dict[str, str]:
    """Return the variables of a new shell, in which `python3` is the Python of these tests."""
    kept = {name: x for name, x in unlaunched().items() if name in HELD or name.startswith(("PIP_", "OMPI_"))}
    path = os.pathsep.join([f"{sys.base_prefix}/bin", *os.defpath.split(os.pathsep)])
    return {**kept, "PATH": path, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "OMP_NUM_THREADS": "1"}


def typed(commands: str, folder: Path) -> str:
    """Run the commands as one types them in `folder`, and return what they print, also into logs."""
    done = programs.run(["bash", "-euc", commands], cwd=folder, env=environment(), timeout=PATIENCE)
    logs = [path.read_text() for path in folder.rglob("*_log.out")]
    return "\n".join([done.stdout, done.stderr, *logs])


@pytest.mark.parametrize(("name", "title"), DOORS, ids=lambda each: re.sub(r"\W+", "-", each))
def test_the_commands_of_a_page_install_and_train(name: str, title: str, clone: Path) -> None:
    door, commands = DOORS[name, title], dict(found(name))[title]
    door.writes(clone)
    printed = typed(ACTIVATE + commands, clone)
    assert [each for each in door.prints if not re.search(each, printed, re.MULTILINE)] == [], printed


def test_the_first_page_makes_an_environment_and_trains(clone: Path) -> None:
    """This page also makes the environment; tests/website/test_start.py has its other commands."""
    blocks = BLOCK.findall(page("start.md"))
    (install,) = (code for language, code in blocks if language == "bash")
    assert install.startswith(ACTIVATE)
    printed = typed("".join([install, *(code for language, code in blocks if language == "sh")]), clone)
    assert "2 groups of 2: test accuracy 0.9" in printed
    assert (clone / "runs/mine/curves.png").exists()
