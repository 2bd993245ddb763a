"""The line of a mistake in a job file: the right one, or none."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from hpcsgd.config.at_line import at_line, line_of
from hpcsgd.config.lines import lines
from hpcsgd.errors import JobError, UserError

ROOT = Path(__file__).parents[2]
TRICKY = '''\
# [not] = a table
seed = 1 # nor = this
a.b = "x # \\" [no]"
"q # \\"x" = """
[method]
every = 1 \\"""
"""
's' = \'\'\'
[data]
store = 2''\'\'\'
[t . "u.v"] # comment
x = { y = 1, z = { w = "}" } }
list = [ # c ]
  { one = 1 },
  "]", 'x', [1, 2], { two = 2, three = [ ] },
]
when = 1979-05-27 07:32:00
[[l]]
a = 1
[[l.m]]
b = 1
[[l]]
a = 2
[l.n]
c = 3
'''
PLACES = {
    ("seed",): 2, ("a",): 3, ("a", "b"): 3, ('q # "x',): 4, ("s",): 8, ("t",): 11, ("t", "u.v"): 11,
    ("t", "u.v", "x"): 12, ("t", "u.v", "x", "y"): 12, ("t", "u.v", "x", "z"): 12,
    ("t", "u.v", "x", "z", "w"): 12, ("t", "u.v", "list"): 13, ("t", "u.v", "list", 0, "one"): 14,
    ("t", "u.v", "list", 4, "two"): 15, ("t", "u.v", "list", 4, "three"): 15, ("t", "u.v", "when"): 17,
    ("l",): 18, ("l", 0, "a"): 19, ("l", 0, "m"): 20, ("l", 0, "m", 0, "b"): 21, ("l", 1, "a"): 23,
    ("l", 1, "n"): 24, ("l", 1, "n", "c"): 25,
}  # fmt: skip

JOB = """\
seed = 1

[data]
store = "s.h5"
batch_size = 8

[method] # every = 3
name = "hierarchical"
every = 0
exchange = { name = "sparse", sparsifier = { name = "topk", density = 2 } }

[training]
steps = 3
samples = 4
"""


def test_every_key_has_its_line() -> None:
    assert lines(TRICKY) == PLACES
    assert lines(TRICKY.replace("\n", "\r\n").replace('"""\r\n[method]', '"""\n[method]')) == PLACES


@pytest.mark.parametrize("text", ["[method\n", "a = 1\na = 2\n", "a = \n", "a = {"])
def test_what_is_no_toml_has_none(text: str) -> None:
    assert lines(text) == {}


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda file: file.name)
def test_the_examples(file: Path) -> None:
    text = file.read_text()
    found = lines(text)
    assert found
    for path, line in found.items():
        assert str(path[-1]) in text.splitlines()[line - 1]


LEAVES = st.integers() | st.booleans() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=4))


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_any_file(tables: dict[str, Any], multiline: bool) -> None:
    text = tomli_w.dumps(tables, multiline_strings=multiline)
    found = lines(text)
    assert set(found) == set(_keys(tomllib.loads(text)))
    for path, line in found.items():
        some = text.split("\n")[line - 1]
        assert str(path[-1]) in some or '"' in some


def _keys(value: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    pairs = list(
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    own = [(*place, key) for key, _ in pairs if isinstance(key, str)]
    return own + [path for key, inner in pairs for path in _keys(inner, (*place, key))]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    return Path("job.toml")


@pytest.mark.parametrize(
    ("message", "flags", "line"),
    [
        ("seed = 1: expected another", "", 1),
        ("[data] batch_size = 8: expected int", "", 5),
        ("[data] batch_size = 8 is the batch of a group", "", 5),
        ("[data]: unknown section: did you mean 'store'?", "", 3),
        ("[method]: every = 0: groups meet", "", 9),
        ("[method]: hierarchical: every = 0: expected 'name'", "", 9),
        ("[method]: hierarchical has no argument 'every'; did you mean 'name'? Allowed: name", "", 9),
        ("[method]: hierarchical has no argument 'evry'; did you mean 'every'? Allowed: name", "", 7),
        ("[method] name: no 'hierarchical'; did you mean 'bsp'?", "", 8),
        ("[method] exchange sparsifier: density = 2: the share", "", 10),
        ("[method] exchange sparsifier name: no 'topk'", "", 10),
        ("[training]: steps = 3 and samples = 4: give one of them", "", 13),
        ("[training] epochs is missing: expected int", "", 12),
        ("[model] build is missing: expected str", "", None),
        # what the file says is not what is wrong
        ("[method]: every = 1: groups meet", "", None),
        ("[method]: every = 0: groups meet", "--method.every 0", None),
        ("[method]: every = 0: groups meet", "--method.every=0", None),
        ("[method]: every = 0: groups meet", "--method {name='x'}", None),
        ("[method]: every = 0: groups meet", "--method.name x", 9),
        ("[method] exchange sparsifier: density = 2", "--method.exchange.name x", 10),
        ("[method] exchange: no", "--method.exchange.name x", None),
        ("[method]: hierarchical has no argument 'evry'", "--method.evry 3", None),
        ("[training] epochs is missing: expected int", "--training.steps none", None),
        ("[method]: does not take samples", "--data.batch_size 8", None),
        ("not valid TOML", "", None),
        ("cannot be read: Permission denied", "", None),
    ],
)
def test_a_message_and_its_line(file: Path, message: str, flags: str, line: int | None) -> None:
    assert line_of(f"{file}: {message}", file, flags.split()) == line
    told = f"{file}: {message}" if line is None else f"{file}:{line}: {message}"
    with pytest.raises(JobError) as caught, at_line(file, flags.split()):
        raise JobError(f"{file}: {message}")
    assert str(caught.value) == told


def test_other_files_have_none(file: Path) -> None:
    for message in ("other.toml: [method]: every = 0", "variant 'a': job.toml: [method]: every = 0", ""):
        assert line_of(message, file) is None
    assert line_of("none.toml: [method]: every = 0", Path("none.toml")) is None
    with pytest.raises(UserError, match=r"^--method.every 0: no$"), at_line(file):
        raise UserError("--method.every 0: no")
