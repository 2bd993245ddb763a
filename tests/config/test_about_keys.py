"""Errors carry the key that they are about, and no code searches for it in their messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from hpcsgd.config.keys import is_known
from hpcsgd.config.schema import Config
from hpcsgd.errors import JobError, UserError, in_file, in_section, located
from hpcsgd.performance.simulation.scenario import Scenario

PACKAGE = Path(__file__).parents[2] / "hpcsgd"
ERRORS = ("UserError", "JobError", "NoWorld", "DivergedError")
SPOT = re.compile(r"\[(?P<section>[a-z_.]+)\](?: (?P<key>[a-z_]+))?")
GIVEN = re.compile(r"(?P<key>[a-z_]+) = ")
OF_JOB_FILES = ("methods/", "parts/", "train/", "performance/probing/delta", "performance/probing/job_file")
"""The paths of the code that creates what a job file names."""


@cache
def _sources() -> Mapping[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


@cache
def _names() -> set[str]:
    """Return the names of arguments, and of the fields of sections."""
    return {
        node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
        for tree in _sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.arg | ast.AnnAssign)
    }


def _calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    for path, tree in _sources().items():
        if path.startswith("cost/"):
            continue  # about machine files, whose lines are not looked up
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield f"{path}:{node.lineno}", node


def _words(call: ast.Call) -> str:
    """Return the message up to its first formatted value."""
    said = call.args[0] if call.args else None
    first = said.values[0] if isinstance(said, ast.JoinedStr) else said
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _key(call: ast.Call) -> list[str | None]:
    """Return the parts of the argument `key`, with None for a part that is computed."""
    said = next((word.value for word in call.keywords if word.arg == "key"), None)
    parts = said.elts if isinstance(said, ast.Tuple) else [] if said is None else [said]
    return [part.value if isinstance(part, ast.Constant) else None for part in parts]  # type: ignore[misc]


@pytest.mark.slow
def test_what_begins_with_a_key_carries_it() -> None:
    found = 0
    for where, call in _calls(*ERRORS):
        words, key = _words(call), _key(call)
        if spot := SPOT.match(words):
            expected = [*spot["section"].split("."), *filter(None, [spot["key"]])]
            assert key[: len(expected)] == expected, where
            found += 1
        elif (given := GIVEN.match(words)) and where.startswith(OF_JOB_FILES):
            assert key == [given["key"]], where
            found += 1
    assert found > 50


def test_places_carry_their_keys() -> None:
    for where, call in _calls("located"):
        assert not SPOT.match(_words(call)), f"{where}: say in_section"


def test_keys_that_errors_name_are_there() -> None:
    paths = [(where, _key(call)) for where, call in _calls(*ERRORS)]
    for where, call in _calls("in_section"):
        named = [part.value for part in call.args if isinstance(part, ast.Constant)]
        if len(named) == len(call.args):
            paths.append((where, [*str(named[0]).split("."), *map(str, named[1:])]))
    whole = 0
    for where, path in paths:
        said = [part for part in path if part is not None]
        if len(path) == 1:
            assert all(part in _names() for part in said), where
        elif len(said) == len(path) > 0:
            kind = Scenario if where.startswith("performance/simulation/") else Config
            assert is_known(".".join(said), kind), where
            whole += 1
    assert whole > 30


def _handlers(tree: ast.Module) -> Iterator[ast.ExceptHandler]:
    """Yield the handlers of our own errors that give the error a name."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ExceptHandler) and node.name is not None and node.type is not None):
            continue
        if set(ERRORS) & {inner.id for inner in ast.walk(node.type) if isinstance(inner, ast.Name)}:
            yield node


def _read_apart(body: list[ast.stmt], name: str) -> Iterator[int]:
    """Yield the lines that take the message of that error apart or compare it."""

    def are_words(node: ast.AST) -> bool:
        return ast.unparse(node) in (f"str({name})", f"{name}.message", f"{name}.args[0]")

    for node in (inner for statement in body for inner in ast.walk(statement)):
        match node:
            case ast.Attribute(value=value) | ast.Subscript(value=value) if are_words(value):
                yield node.lineno
            case ast.Compare(left=left, comparators=others) if any(map(are_words, [left, *others])):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=value), args=args) if any(map(are_words, args)):
                if re.fullmatch(r"re|_?[A-Z_]+", ast.unparse(value)):
                    yield node.lineno
            case _:
                pass


def test_nothing_reads_our_own_messages() -> None:
    handlers = [(path, each) for path, tree in _sources().items() for each in _handlers(tree)]
    assert len(handlers) > 10
    for path, handler in handlers:
        assert not list(_read_apart(handler.body, str(handler.name))), path
    assert not re.search(r"^import re$|str\(error\)", (PACKAGE / "config" / "at_line.py").read_text(), re.M)


@pytest.mark.parametrize(
    "code",
    [
        "str(error).startswith('x')", "error.message[0]", "'x' in str(error)", "re.search('x', str(error))",
        "_X.match(error.message)", "error.args[0].split()",
    ],
)  # fmt: skip
def test_what_reads_messages_is_found(code: str) -> None:
    assert list(_read_apart(ast.parse(code).body, "error"))
    assert not list(_read_apart(ast.parse("say(str(error), f'{error}', error.message)").body, "error"))


def test_places_add_up() -> None:
    layer = located("layer 3", "layers", 3)
    with pytest.raises(JobError) as caught, in_file("a.toml"), in_section("model.arguments"), layer:
        raise JobError("size = 0: no", key="size", value=0)
    assert str(caught.value) == "a.toml: [model.arguments]: layer 3: size = 0: no"
    assert caught.value.about == ("a.toml", ("model", "arguments", "layers", 3, "size"), 0)


def test_a_key_of_another_file_is_none_of_this_one() -> None:
    machine = in_section("training", "machine")
    with (
        pytest.raises(UserError) as caught,
        in_file("a.toml"),
        machine,
        in_file("b.toml"),
        in_section("link"),
    ):
        raise UserError("no", key="bytes")
    assert str(caught.value) == "a.toml: [training] machine: b.toml: [link]: no"
    assert caught.value.about == ("a.toml", ("training", "machine"), None)
    with pytest.raises(UserError) as caught, in_section("data", "path"), located("s.h5"):
        raise UserError("size = 0: no", key="size", value=0)
    assert caught.value.about == (None, ("data", "path"), None)
