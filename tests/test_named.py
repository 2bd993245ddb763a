from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcsgd.errors import UserError
from hpcsgd.named import call, call_named, resolve

TABLE = {"short": len, "other": repr}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make an empty folder the current one, and make its modules importable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_short_name_and_a_module() -> None:
    assert resolve("short", TABLE) is len
    assert resolve("os.path:join", TABLE) is __import__("os").path.join
    assert resolve("torch.optim:SGD", {}) is torch.optim.SGD
    assert resolve("pathlib:Path.cwd", {})() == Path.cwd()


def test_a_module_in_the_current_folder(here: Path) -> None:
    (here / "package_of_mine").mkdir()
    (here / "package_of_mine" / "part.py").write_text("def f(): return 7\n")
    assert resolve("package_of_mine.part:f", TABLE)() == 7
    (here / "later_module.py").write_text("def g(): return 8\n")
    assert resolve("later_module:g", TABLE)() == 8


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("shrt", "no 'shrt'; did you mean 'short'. Allowed: other, short, or \"package.module:function\""),
        (
            "no_such_module_1:f",
            "'no_such_module_1:f': no module 'no_such_module_1', neither installed nor in",
        ),
        ("os.no_such:f", "'os.no_such:f': no module 'os.no_such'"),
        ("os.path:jion", "no 'jion' in posixpath; did you mean 'join'"),
        ("os:sep", "'os:sep': is of type str, not a function"),
        ("os:", "'os:' is not of the form"),
        (":f", "':f' is not of the form"),
        ("a:b:c", "'a:b:c' is not of the form"),
        ("../a:b", "is not of the form"),
    ],
)
def test_what_is_not_there(here: Path, reference: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(reference, TABLE)
    assert message.replace("short'.", "short'?") in str(caught.value)


def test_what_a_module_raises_comes_through(here: Path) -> None:
    (here / "breaks_itself.py").write_text("raise ZeroDivisionError('mine')\n")
    with pytest.raises(ZeroDivisionError, match="mine"):
        resolve("breaks_itself:f", TABLE)
    (here / "misses_another.py").write_text("import no_such_module_2\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_2"):
        resolve("misses_another:f", TABLE)


def rule(first: Any, second: int = 2, *, third: int) -> tuple[Any, int, int]:
    return first, second, third


def test_arguments_are_passed() -> None:
    assert call(rule, {"third": 3}, 1) == (1, 2, 3)
    assert call(rule, {"first": 0, "second": 1, "third": 3}) == (0, 1, 3)
    assert call(dict, {"a": 1}) == {"a": 1}
    weights = [torch.nn.Parameter(torch.zeros(1))]
    assert call(torch.optim.SGD, {"lr": 0.25}, weights).param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (
            rule,
            {"thirds": 3},
            "rule has no argument 'thirds'; did you mean 'third'? Allowed: second, third",
        ),
        (rule, {"first": 3}, "rule has no argument 'first'"),
        (rule, {"second": 3}, "rule needs 'third'; given: second"),
        (lambda first: first, {"x": 1}, "<lambda> has no argument 'x'; it takes none"),
        (torch.optim.SGD, {"lrr": 0.1}, "SGD has no argument 'lrr'; did you mean 'lr'"),
    ],
)
def test_wrong_arguments(function: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        call(function, arguments, [torch.nn.Parameter(torch.zeros(1))])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"betas": [0.9]}, "Adam: IndexError (list index out of range) of betas = [0.9]"),
        ({"lr": "a"}, "Adam: "),
    ],
)
def test_what_breaks_a_known_function_is_reported(arguments: dict[str, Any], message: str) -> None:
    table = {"Adam": torch.optim.Adam}
    with pytest.raises(UserError) as caught:
        call_named("Adam", torch.optim.Adam, table, arguments, [torch.nn.Parameter(torch.zeros(1))])
    assert str(caught.value).startswith(message)
    with pytest.raises((LookupError, TypeError)) as raised:  # for a user's own error the traceback says more
        call_named("mine:Adam", torch.optim.Adam, table, arguments, [torch.nn.Parameter(torch.zeros(1))])
    given = ", ".join(f"{key} = {value!r}" for key, value in arguments.items())
    assert raised.value.__notes__ == [f"mine:Adam was called with {given}, as the job file says"]


def test_kinds_beside_none_are_looked_at() -> None:
    def takes(size: int | None = None, name: str | int = "", rest: list[int] | None = None) -> object:
        return size, name, rest

    assert call(takes, {"size": 3, "name": 4, "rest": [1]}) == (3, 4, [1])
    with pytest.raises(UserError, match=r"takes: size = 'large': expected int$"):
        call(takes, {"size": "large"})
    with pytest.raises(UserError, match=r"takes: name = 1.5: expected str or int$"):
        call(takes, {"name": 1.5})
    with pytest.raises(UserError, match=r"takes: rest = 32: expected list$"):
        call(takes, {"rest": 32})


def test_lists_and_tables_are_distinguished_from_single_values() -> None:
    def takes(
        widths: Sequence[int] = (), pair: tuple[int, int] | None = None, table: dict[str, Any] | None = None
    ) -> object:
        return widths, pair, table

    assert call(takes, {"widths": [1], "pair": [1, 2], "table": {"a": 1}}) == ([1], [1, 2], {"a": 1})
    with pytest.raises(UserError, match=r"^takes: widths = 32: expected list$"):
        call(takes, {"widths": 32})
    with pytest.raises(UserError, match=r"^takes: pair = \{'a': 1\}: expected list$"):
        call(takes, {"pair": {"a": 1}})
    with pytest.raises(UserError, match=r"^takes: table = \[1\]: expected dict$"):
        call(takes, {"table": [1]})


def test_what_the_function_raises_comes_through() -> None:
    def fails(value: int = 0) -> None:
        raise TypeError("fails() got an unexpected keyword argument 'value'")

    with pytest.raises(TypeError) as caught:
        call(fails, {"value": 1})
    assert not isinstance(caught.value, UserError)
