"""Mutants are one-line changes of what is executed; the same seed draws the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.equivalent import EQUIVALENT
from mutants.sites import Mutant, draw, mutants, mutants_of

TEXT = '''\
"""1 + 1"""
def f(x: int = 3, *, on: bool = True) -> list[int]:
    assert x > 0, "x < 1"
    if not on and x <= 2:
        raise ValueError(f"{x + 1}")
    x += 1
    print(x)
    return [x - 1]
'''


def test_each_change_is_one_of_one_line():
    found = [(mutant.line, mutant.after.strip()) for mutant in mutants_of("a/b.py", TEXT)]
    assert sorted(found) == sorted([
        (2, "def f(x: int = 4, *, on: bool = True) -> list[int]:"),
        (2, "def f(x: int = 3, *, on: bool = False) -> list[int]:"),
        (4, "if (not (not on and x <= 2)):"),
        (4, "if ((not on) or (x <= 2)):"),
        (4, "if (on) and x <= 2:"),
        (4, "if not on and x < 2:"),
        (4, "if not on and x <= 3:"),
        (6, "x -= 1"),
        (6, "x += 2"),
        (7, "pass"),
        (8, "return None"),
        (8, "return [(x + 1)]"),
        (8, "return [x - 2]"),
    ])  # fmt: skip


UNREAD = ("if TYPE_CHECKING:\n    x = 1\n", "x: Mapping[int, 3]\n", "def __repr__(x):\n    return x + 1\n")


@pytest.mark.parametrize("text", UNREAD)
def test_what_only_people_and_type_checkers_read_stays(text):
    assert mutants_of("a/b.py", text) == []


def test_a_mutant_is_the_file_with_that_line_changed():
    mutant = mutants_of("a/b.py", TEXT)[-1]
    assert mutant.applied(TEXT) == TEXT.replace("x - 1", "x - 2")
    with pytest.raises(AssertionError, match="changed since"):
        mutant.applied("\n" + TEXT)


def test_files_and_folders_are_named_from_the_root(tmp_path):
    for file in ("h/a.py", "h/b/c.py", "h/b/d.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x = 1\n")
    found = [mutant.file for mutant in mutants(tmp_path, ["h/b", "h/a.py", "h/b/c.py"])]
    assert found == ["h/a.py", "h/b/c.py", "h/b/d.py"]


def test_every_package_has_its_share():
    found = [Mutant(f"h/{package}/a.py", line, "x", "y") for package in "abc" for line in range(100)]
    found.append(Mutant("h/small/a.py", 1, "x", "y"))
    drawn = draw(list(found), 31, seed=1)
    packages = [mutant.package for mutant in drawn]
    assert (len(set(drawn)), packages.count("h/small")) == (31, 1)
    assert all(packages.count(f"h/{package}") == 10 for package in "abc")
    assert drawn == draw(list(found), 31, seed=1) != draw(list(found), 31, seed=2)


@pytest.mark.parametrize("key", EQUIVALENT)
def test_what_is_said_to_change_nothing_is_there(key: tuple[str, str, str]):
    text = (Path(__file__).parents[2] / key[0]).read_text()
    assert key in {mutant.key for mutant in mutants_of(key[0], text)}
