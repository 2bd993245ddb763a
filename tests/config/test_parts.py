"""The annotation of a parameter decides what its value in a job file means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Protocol, runtime_checkable

import pytest

from hpcsgd.config.parts import Parts, alternatives
from hpcsgd.errors import UserError

HERE = __name__


@runtime_checkable
class Fruit(Protocol):
    @property
    def sweet(self) -> bool: ...


@dataclass(frozen=True)
class Plum:
    stones: int = 1
    sweet = True


@dataclass(frozen=True)
class Pie:
    """A fruit that contains another fruit."""

    filling: Fruit
    slices: int = 4
    sweet = True


@dataclass(frozen=True)
class Quince:
    """A fruit that the user wrote, which is not in `PARTS`."""

    pounds: float = 1
    sweet = False


@dataclass(frozen=True)
class Stone:
    """A class that is not a fruit."""


Peel = Callable[[Fruit], int]


def thin(fruit: Fruit) -> int:
    return 1


def thick(fruit: Fruit, by: int) -> int:
    return by


PARTS = Parts({Fruit: {"plum": Plum, "pie": Pie}, Peel: {"thin": thin, "thick": thick}}, steps_per_epoch=100)


@dataclass(frozen=True)
class Given:
    """The arguments that a function received."""

    values: dict[str, Any]


def given_to_a_function(**given: Any) -> dict[str, Any]:
    def wanted(
        fruit: Fruit | None = None,
        also: Annotated[Fruit, "ripe"] = Plum(),
        dish: Fruit | float = 0.0,
        peel: Peel = thin,
        every: int = 1,
        at: str | int = 0,
        plain=None,
        size: float = 0.0,
    ) -> Given:
        return Given(locals())

    parts = Parts({**PARTS.families, Given: {"wanted": wanted}}, PARTS.steps_per_epoch)
    return parts.make(Given, {"name": "wanted", **given}, "here").values


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"fruit": "plum"}, Plum()),
        ({"fruit": {"name": "plum", "stones": 3}}, Plum(3)),
        ({"fruit": {"name": "pie", "filling": "plum"}}, Pie(Plum())),
        ({"fruit": {"name": "pie", "filling": {"name": "plum", "stones": 2}}}, Pie(Plum(2))),
        ({"fruit": {"name": "pie", "filling": "plum", "slices": {"epoch": 2}}}, Pie(Plum(), 200)),
        ({"fruit": f"{HERE}:Quince"}, Quince()),
        ({"fruit": {"name": f"{HERE}:Quince", "pounds": 2}}, Quince(2)),
        ({"also": "plum"}, Plum()),
        ({"dish": "plum"}, Plum()),
        ({"dish": 3}, 3),
        ({"peel": "thin"}, thin),
        ({"peel": f"{HERE}:thin"}, thin),
        ({"every": 3}, 3),
        ({"every": {"epoch": 3}}, 300),
        ({"at": {"epoch": 3}}, 300),
        ({"at": "last"}, "last"),
        ({"plain": {"epoch": 3}}, {"epoch": 3}),
        ({"plain": "plum"}, "plum"),
        ({"size": 0.5}, 0.5),
    ],
)
def test_the_annotation_says_what_is_meant(given: dict[str, Any], made: Any) -> None:
    (key,) = given
    assert given_to_a_function(**given)[key] == made


def test_arguments_are_bound_to_a_function() -> None:
    peel = PARTS.make(Peel, {"name": "thick", "by": 3}, "here")
    assert peel(Plum()) == 3


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"fruit": "plumm"}, "[here] fruit: no 'plumm'; did you mean 'plum'? Allowed: pie, plum, or "),
        ({"fruit": {"name": "plumm"}}, "[here] fruit name: no 'plumm'; did you mean 'plum'?"),
        (
            {"fruit": {"build": "plum"}},
            "[here] fruit = {'build': 'plum'}: expected a name, or a table with it;",
        ),
        ({"fruit": 3}, "[here] fruit = 3: expected a name, or a table with it; Allowed: pie, plum"),
        ({"fruit": {"stones": 3}}, "[here] fruit = {'stones': 3}: expected a name, or a table with it;"),
        ({"fruit": {"name": 3}}, "[here] fruit = {'name': 3}: expected a name, or a table with it;"),
        ({"fruit": {"name": "plum", "stone": 3}}, "[here] fruit: Plum has no argument 'stone'; did you mean"),
        ({"fruit": "pie"}, "[here] fruit: Pie needs 'filling'; given: none"),
        ({"fruit": {"name": "pie", "filling": "plumm"}}, "[here] fruit filling: no 'plumm'; did you mean"),
        ({"fruit": f"{HERE}:Stone"}, f"[here] fruit: '{HERE}:Stone' makes a Stone, expected a Fruit"),
        ({"fruit": f"{HERE}:Quins"}, f"[here] fruit: '{HERE}:Quins': no 'Quins' in {HERE}; did you mean"),
        ({"every": {"epoch": 1.5}}, "[here]: wanted: every = {'epoch': 1.5}: expected int"),
        (
            {"every": {"epoch": 1, "step": 50}},
            "[here]: wanted: every = {'epoch': 1, 'step': 50}: expected int",
        ),
        ({"peel": {"name": "thin", "by": 3}}, "[here] peel: thin has no argument 'by'; it takes none"),
        ({"peel": "thick"}, "[here] peel: thick needs 'by'; given: none"),
        ({"peel": {"name": "thick", "by": "3"}}, "[here] peel: thick: by = '3': expected int"),
        (
            {"peel": f"{HERE}:Stone"},
            "[here] peel: Stone takes fewer than the 1 values that",
        ),
    ],
)
def test_mistakes(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        given_to_a_function(**given)
    assert str(caught.value).startswith(line)


def test_names_that_are_not_there_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a value that needs the missing name is refused. The other annotations are still read."""
    (tmp_path / "hidden_names.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from elsewhere import Fruit\n"
        "def f(fruit: Fruit = None, every: int = 1):\n"
        "    return fruit, every\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parts = Parts({tuple: {}}, 100)
    name = "hidden_names:f"
    try:
        assert parts.make(tuple, {"name": name, "every": {"epoch": 2}, "fruit": 5}, "here") == (5, 200)
        with pytest.raises(UserError, match=r"\[here\] fruit: .* the annotation 'Fruit' has names that"):
            parts.make(tuple, {"name": name, "fruit": "plum"}, "here")
    finally:
        sys.modules.pop("hidden_names", None)


def test_alternatives() -> None:
    named = SimpleNamespace(__value__=Fruit | None)  # the form of `type X = …`, from Python 3.12 on
    assert alternatives(int) == [int]
    assert alternatives(Annotated[int | None, "x"] | Peel) == [int, type(None), Peel]
    assert alternatives(named) == [Fruit, type(None)]
