"""Parts of parts, as a job file has them: what a value means, the annotation of its parameter says.

    def mine(grad_reduce: GradReduce, sync_every: int, then: Method | None = None): ...

Given to `exchange` a name is one of exchanges, and so is a table with a name and arguments, which may be
parts again. The name is of the table beside the family, or "package.module:function" of the user's own. Given
to `every`, or wherever an int may be, ``{ epoch = 2 }`` is the number of steps in two epochs. Everything
else, and what is given to a parameter without an annotation, is passed on as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from hpcsgd.errors import UserError, in_section, located, near_miss, spot
from hpcsgd.named import annotations_of, call_named, require_arguments, resolve

NAME = "name"
"""The key of a table that says which part it is."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What makes parts of what a job file says.

    `families` has the names of a kind of part by the type with which parameters for it are annotated. Where
    that is ``Callable[[…], …]`` a name means the function itself, arguments being bound to it; else what the
    function makes of the arguments. A function that has an argument `steps_per_epoch` need not be given it,
    where that is known.
    """

    families: Mapping[Any, Mapping[str, Callable[..., Any]]]
    steps_per_epoch: int | None
    """None: not known."""

    def make(self, kind: Any, value: Any, section: str, *keys: str) -> Any:
        """The part of that kind which `value`, given as this section or at this key of it, calls.

        Raises `UserError`, naming the place, for what names none, does not take the arguments or makes
        something else. What a function of the user's raises itself comes through untouched.
        """
        table = self.families[kind]
        at, name, given = _called(value, table, section, *keys)
        with in_section(section, *keys, *at):
            function = resolve(name, table)
        arguments = {k: self._argument(function, v, section, *keys, k) for k, v in given.items()}
        if get_origin(kind) is Callable:
            return _bound(name, function, table, arguments, kind, section, *keys)
        if self.steps_per_epoch is not None and "steps_per_epoch" in annotations_of(function):
            arguments.setdefault("steps_per_epoch", self.steps_per_epoch)
        with in_section(section, *keys):
            made = call_named(name, function, table, arguments)
            if not isinstance(made, kind):
                raise UserError(f"{name!r} makes a {type(made).__name__}, expected a {kind.__name__}")
        return made

    def _argument(self, function: Callable[..., Any], value: Any, section: str, *keys: str) -> Any:
        """What `value` means for this function's parameter, which has the name of the last key."""
        kinds = alternatives(annotations_of(function).get(keys[-1]))
        if int in kinds and isinstance(value, dict) and type(value.get("epoch")) is int:
            if self.steps_per_epoch is None:
                with in_section(section, *keys):
                    raise UserError(
                        "how many steps an epoch has is not known here: say [job] steps_per_epoch, or a "
                        "number of steps"
                    )
            return value["epoch"] * self.steps_per_epoch
        family = next((kind for kind in kinds if kind in self.families), None)
        others = [kind for kind in kinds if kind not in (family, type(None))]
        names_one = isinstance(value, str | dict)
        if family is not None and (names_one or not others):
            return self.make(family, value, section, *keys)
        with in_section(section, *keys):
            if names_one and any(isinstance(kind, str) for kind in kinds):
                raise UserError(
                    f"what it is for cannot be told: the annotation {kinds[0]!r} has names that are not "
                    "there when the job file is read, as those imported under TYPE_CHECKING are not"
                )
        return value


def alternatives(annotation: Any) -> list[Any]:
    """The types of a union, of any other annotation that one; aliases and ``Annotated`` looked through."""
    annotation = getattr(annotation, "__value__", annotation)  # of `type X = …`
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in alternatives(part)]
    return [annotation]


def _called(
    value: Any, table: Mapping[str, Any], section: str, *keys: str
) -> tuple[tuple[str, ...], str, Mapping[str, Any]]:
    """The key of the name, if there is one, the name and the arguments."""
    if isinstance(value, str):
        return (), value, {}
    if not (isinstance(value, dict) and isinstance(value.get(NAME), str)):
        raise UserError(
            f"{spot(section, *keys)} = {value!r}: expected a name, or a table with it; "
            f"{near_miss('', table)}",
            key=(section, *keys),
        )
    return (NAME,), value[NAME], {k: v for k, v in value.items() if k != NAME}


def _bound(
    name: str,
    function: Callable[..., Any],
    table: Mapping[str, Callable[..., Any]],
    arguments: Mapping[str, Any],
    kind: Any,
    section: str,
    *keys: str,
) -> Callable[..., Any]:
    """`function` itself where nothing is bound to it."""
    leading, _ = get_args(kind)
    with in_section(section, *keys):
        require_arguments(function, arguments, len(leading))
    if not arguments:
        return function

    def part(*values: Any) -> Any:
        # Whoever calls it adds the place of its own.
        with located(keys[-1], keys[-1]) if keys else in_section(section):
            return call_named(name, function, table, arguments, *values)

    return part
