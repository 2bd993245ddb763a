"""The pages about the code agree with it: paths exist, and the diagram of packages is the contract's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("docs/architecture.md", "docs/glossary.md")
MORE = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/papers/README.md")
NAMED = re.compile(r"`((?:hpcsgd|csrc|tests|benchmarks|docs|jobs|examples)/[\w./-]*)`")
LINKED = re.compile(r"\]\((?!https?:)([^)#]+)")
ENTRY = re.compile(r"^- \*\*.*(?:\n  .*)*", re.MULTILINE)


def lost(text: str, folder: Path) -> list[str]:
    """Return the paths that a page in `folder` names or links to and that do not exist."""
    named = [path for path in NAMED.findall(text) if not (ROOT / path).exists()]
    return named + [path for path in LINKED.findall(text) if not (folder / path).exists()]


def incomplete(text: str) -> list[str]:
    """Return the entries of the glossary that lack a path of the code or a contrast with another term."""
    return [
        entry
        for entry in ENTRY.findall(text)
        if not NAMED.search(entry) or " Not " not in entry.replace("\n", " ")
    ]


def drawn(text: str) -> list[set[str]]:
    """Return the packages in the first diagram, line by line."""
    picture = text.split("```text\n")[1].split("```", maxsplit=1)[0]
    return [set(line.split("  ")[0].split(" · ")) for line in picture.splitlines()]


def agreed() -> list[set[str]]:
    """Return the packages of the contract, layer by layer, without `__main__`."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [set(re.findall(r"\w+", layer)) for layer in contracts[0]["layers"]]
    return [layer for layer in layers if layer != {"__main__"}]


def test_what_pages_name_is_there() -> None:
    for page in (*PAGES, *MORE):
        path = ROOT / page
        assert lost(path.read_text(), path.parent) == [], page


def test_the_pages_are_linked() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        assert set(PAGES) <= set(LINKED.findall((ROOT / page).read_text()))


def test_every_term_has_a_home_and_a_contrast() -> None:
    text = (ROOT / "docs/glossary.md").read_text()
    assert len(ENTRY.findall(text)) == text.count("\n- **") > 0
    assert incomplete(text) == []


def test_the_picture_of_the_rooms_is_the_contract() -> None:
    assert drawn((ROOT / "docs/architecture.md").read_text()) == agreed()


def test_a_lost_path_is_found() -> None:
    text = "`hpcsgd/core/flat.py`, `hpcsgd/core/gone.py`, [this](tests), [that](nowhere.md), [far](https://far.away)"
    assert lost(text, ROOT) == ["hpcsgd/core/gone.py", "nowhere.md"]


def test_an_incomplete_term_is_found() -> None:
    text = "- **a**: so. `hpcsgd/core`. Not\n  b.\n- **b**: so.\n  Not a.\n- **c**: `hpcsgd/core`.\n"
    assert [entry[4] for entry in incomplete(text)] == ["b", "c"]


def test_another_picture_is_found() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert drawn(text.replace("engine · data", "engine\ndata")) != agreed()
