"""The tests that a tier runs, and the search for what tests leave behind."""

from __future__ import annotations

import itertools
import mmap
import os
import re
import shlex
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import programs
import tier
from brief import brief, may_be_for_ranks
from covering import covering, factors, repeated


@dataclass(eq=False)
class Item:
    """The parts of a pytest item that `brief` reads."""

    nodeid: str
    params: dict[str, Any] = field(default_factory=dict)
    mark: str = ""
    fixturenames: tuple[str, ...] = ("run",)

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.params)

    def get_closest_marker(self, name: str) -> object:
        return True if name == self.mark else None


def chosen(items: list[Item], on_ranks: bool = False) -> list[Item]:
    of_a_brief_run: Any = brief(items, on_ranks=on_ranks)  # pyright: ignore[reportArgumentType]
    return [item for item in items if item in of_a_brief_run]


def test_a_brief_run_has_every_method_once_on_an_awkward_shape():
    items = [
        Item(f"t.py::f[{method}-{P}-{K}]", {"method": method, "P": P, "K": K})
        for method in ("a", "b")
        for P, K in ((1, 2), (2, 2), (3, 1), (3, 2), (4, 2))
    ]
    assert [item.params for item in chosen(items)] == [
        {"method": "a", "P": 3, "K": 2},
        {"method": "b", "P": 3, "K": 2},
    ]


def test_a_brief_run_has_each_value_of_what_is_tested():
    items = [Item(f"t.py::f[{wire}-{part}]", {"wire": wire, "part": part}) for wire in "xyz" for part in "ab"]
    assert ["".join(item.params.values()) for item in chosen(items)] == ["xa", "yb", "za"]


@pytest.mark.parametrize(
    ("file", "mark", "kept"),
    [("tests/comm/t.py", "", 1), ("t.py", "every_method", 1), ("t.py", "processes", 1), ("t.py", "", 0)],
)
def test_a_brief_run_on_ranks_has_one_item_of_what_depends_on_the_backend(
    file: str, mark: str, kept: int
) -> None:
    items = [Item(f"{file}::f[{part}]", {"part": part}, mark) for part in "ab"]
    assert chosen(items, on_ranks=True) == items[:kept]


@pytest.mark.parametrize(
    ("file", "text", "wanted"),
    [
        ("tests/comm/test_a.py", "", True),
        ("tests/core/test_a.py", "@pytest.mark.every_method", True),
        ("tests/core/test_a.py", "pytestmark = pytest.mark.processes", True),
        ("tests/core/test_a.py", "@pytest.mark.slow", False),
    ],
)
def test_a_brief_run_on_ranks_reads_no_file_without_such_tests(file: str, text: str, wanted: bool) -> None:
    assert may_be_for_ranks(Path(file), text) is wanted


def test_the_long_run_has_what_repeats_pairs_of_values():
    items = [
        Item(f"t.py::f[{method}-{n}-{part}]", {"method": method, "n": n, "part": part})
        for method in "xyz"
        for n in (1, 2, 3)
        for part in "ab"
    ]
    kept = kept_by_test_all(items)
    for one, other in itertools.combinations(("method", "n", "part"), 2):
        pairs = {(item.params[one], item.params[other]) for item in items}
        assert {(item.params[one], item.params[other]) for item in kept} == pairs
    assert len(kept) == 9


def test_a_test_of_all_methods_has_each_method_once_unless_its_mark_says_pairs():
    items = [
        Item(f"t.py::f[{method}-{n}]", {"method": method, "n": n}) for method in range(12) for n in (2, 3)
    ]
    assert sorted(item.params["method"] for item in kept_by_test_all(items)) == list(range(12))
    for item in items:
        item.mark = "every_method"
    assert kept_by_test_all(items) == items


@pytest.mark.parametrize(
    ("mark", "file", "kept"),
    [
        ("processes", "tests/t.py", 6),
        ("every_method", "tests/t.py", 3),
        ("", "tests/comm/t.py", 3),
        ("", "t.py", 1),
    ],
)
def test_ranks_try_pairs_of_what_only_they_can_run_and_one_case_of_what_threads_have_tried(
    mark: str, file: str, kept: int
) -> None:
    items = [
        Item(f"{file}::f[{method}-{part}]", {"method": method, "part": part}, mark)
        for method in "xyz"
        for part in "ab"
    ]
    assert len(kept_by_test_all(items, on_ranks=True)) == kept


def test_where_an_item_is_slow_each_value_is_tried_once_and_the_slow_ones_last():
    items = [Item(f"t.py::f[{n}-{part}]", {"n": n, "part": part}) for n in (3, 4) for part in "ab"]
    items[0].mark = "slow"
    assert [item.params for item in kept_by_test_all(items)] == [
        {"n": 3, "part": "b"},
        {"n": 4, "part": "a"},
    ]


def kept_by_test_all(items: list[Item], on_ranks: bool = False) -> list[Item]:
    of_the_long_run: Any = set(repeated(items, on_ranks=on_ranks))  # pyright: ignore[reportArgumentType]
    return [item for item in items if item not in of_the_long_run]


def test_a_choice_has_all_values_that_occur_and_only_these():
    found = [{"a": a, "b": b} for a, b in ("11", "12", "22", "31")]
    assert covering(found, together=1) == [0, 2, 3]
    assert covering(found, together=2) == [0, 1, 2, 3]
    assert covering([{}], together=2) == [0]


def test_a_shape_is_one_value_where_a_test_runs_on_ranks():
    item: Any = Item("t.py::f", {"P": 2, "K": 3, "x": "a"})
    assert factors(item) == {"x": "'a'", "shape": "{'P': '2', 'K': '3'}"}
    item.fixturenames = ()
    assert factors(item) == {"P": "2", "K": "3", "x": "'a'"}


def test_a_brief_run_has_one_of_each_test_that_is_not_slow():
    items = [Item("t.py::f"), Item("t.py::g", mark="slow")]
    items += [Item(f"t.py::h[{n}]", {"n": n}) for n in (1, 2, 3, 4)]
    assert [item.nodeid for item in chosen(items)] == ["t.py::f", "t.py::h[3]"]


def test_a_brief_run_has_a_quarter_of_many_methods_in_each_test_and_another_quarter_in_the_next():
    methods = [str(i) for i in range(12)]
    items = [
        Item(f"{test}[{method}]", {"method": method})
        for test in ("t::f", "t::g", "u::f")
        for method in methods
    ]
    items += [Item(f"u::all[{method}]", {"method": method}, mark="every_method") for method in methods]
    items += [Item(f"u::few[{method}]", {"method": method}) for method in methods[:11]]
    found: dict[str, list[int]] = defaultdict(list)
    for item in chosen(items):
        found[item.nodeid.split("[")[0]].append(int(item.params["method"]))
    assert found == {
        "t::f": [0, 4, 8],
        "t::g": [1, 5, 9],
        "u::f": [0, 4, 8],
        "u::all": list(range(12)),
        "u::few": list(range(11)),
    }


def test_a_brief_run_has_each_number_that_is_not_one_of_ranks():
    items = [Item(f"t.py::f[{n}]", {"n": n}, fixturenames=()) for n in (1, 2, 3, 4)]
    assert chosen(items) == items


def test_what_is_left_to_longer_runs_is_not_chosen_in_place_of_another():
    items = [Item("t.py::f[3]", {"n": 3}, mark="long"), Item("t.py::f[4]", {"n": 4})]
    assert [item.nodeid for item in chosen(items)] == ["t.py::f[4]"]


def test_a_process_that_is_left_is_found(monkeypatch):
    monkeypatch.setattr(tier, "GRACE", 0.2)
    process = programs.start(["sleep", "60"], env={**os.environ, tier.MARK: "here"})
    try:
        assert tier.left_running("elsewhere") == []
        assert tier.left_running("here") == [f"process {process.pid}: sleep 60 "]
    finally:
        programs.kill(process)
        process.communicate()
    assert tier.left_running("here") == []


HUNG = """
import time

def hangs():
    print("hangs", flush=True)
    while True:
        time.sleep(600)

hangs()
"""


def test_a_part_that_takes_too_long_writes_what_it_is_at(capsys):
    command = [sys.executable, "-X", "faulthandler", "-c", HUNG]
    with programs.start(command, env={**os.environ, tier.MARK: "hung"}) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "hangs\n"
        assert tier.ended(process, 0.1, "hung") == 1
        assert process.returncode == -signal.SIGABRT
        assert "in hangs" in process.stderr.read()
    assert capsys.readouterr().out == "The tests are not through after 0.1 s. What they were at:\n"


def test_a_file_that_is_left_is_found(tmp_path):
    (tmp_path / "pytest-of-somebody").mkdir()
    assert tier.left_in(tmp_path) == []
    (tmp_path / "left").touch()
    assert tier.left_in(tmp_path) == [str(tmp_path / "left")]
    assert tier.owned(tmp_path) == {tmp_path / "left", tmp_path / "pytest-of-somebody"}


@pytest.mark.parametrize(("name", "numbers"), [("test-all", [2, 4, 8]), ("test-long", [4])])
def test_tests_of_communicators_run_by_torchrun_as_well(name: str, numbers: list[int]) -> None:
    commands = dict(tier.parts(tier.TIERS[name], "mpiexec"))
    by_torchrun = {title: command for title, command in commands.items() if "torchrun" in title}
    assert list(by_torchrun) == [f"{n} ranks of torchrun" for n in numbers]
    for command in by_torchrun.values():
        files = [word for word in command if word.startswith("tests/")]
        assert "tests/comm" in files or {"tests/comm/test_by_node.py", "tests/comm/test_stats.py"} <= {*files}
        assert all((tier.ROOT / file).exists() for file in files)


PARTS = {
    "passes": ("true", 0),
    "fails": ("exit 3", 3),
    "leaves a file": ('touch "$TMPDIR/left"', 1),
    "leaves a process": ("sleep 2 >&- 2>&- &", 1),
    "leaves shared memory": ('echo some > "$TMPDIR/../../shared/left"', 1),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_tier_passes_if_its_parts_do_and_leave_nothing(monkeypatch, capsys, tmp_path, part):
    command, code = PARTS[part]
    monkeypatch.setattr(tier, "GRACE", 0.2)
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(tier, "SHARED_MEMORY", shared)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tier.tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(tier, "parts", lambda *_: [("a shell", ["sh", "-c", command])])
    assert tier.main("test", "mpiexec") == code
    said = capsys.readouterr().out
    assert said.startswith("== tests on a shell\n")
    assert (re.search(r"make test passed in \d+:\d\d and left nothing behind\.", said) is not None) == (
        code == 0
    )
    assert ("Their files are in" in said) == (code == 3)
    assert ("left something behind:\n  " in said) == (code == 1)
    assert any(temporary.iterdir()) == (code != 0)


def test_what_killed_programs_left_is_removed_unless_somebody_has_it(monkeypatch, capsys, tmp_path):
    command = f'echo some > {shlex.quote(str(tmp_path))}/mpich_shm_1; touch "$TMPDIR/left"'
    monkeypatch.setattr(tier, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tier, "parts", lambda *_: [("a shell", ["sh", "-c", command])])
    assert tier.main("test-all", "mpiexec") == 0
    assert not any(tmp_path.iterdir())
    (tmp_path / "mpich_shm_2").write_text("some")
    (tmp_path / "of another program").write_text("some")
    (tmp_path / "sem.mp-3").write_text("some")
    with (tmp_path / "sem.mp-3").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        tier.remove(set(tmp_path.iterdir()))
    assert {path.name for path in tmp_path.iterdir()} == {"of another program", "sem.mp-3"}


def test_what_another_program_uses_was_not_left(monkeypatch, tmp_path):
    begun = tmp_path / "mpich_shm_4"
    monkeypatch.setattr(tier, "SHARED_MEMORY", tmp_path)
    with ExitStack() as other:

        def parts(*_: object) -> Iterator[tuple[str, list[str]]]:
            begun.write_text("some")
            file = other.enter_context(begun.open("r+b"))
            other.enter_context(mmap.mmap(file.fileno(), 0))
            yield "a shell", ["true"]

        monkeypatch.setattr(tier, "parts", parts)
        assert tier.main("test", "mpiexec") == 0
    assert begun.exists()
