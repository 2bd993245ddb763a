"""Parts of methods in a job file: the annotation of a parameter decides what a value means.

    def mine(grad_reduce: GradReduce, sync_every: int, then: Method | None = None): ...

A name given for `grad_reduce` means a gradient reduction. So does a table with a name and arguments, and
these arguments may be parts, too. The name is one that `families` lists, or the user's own
"package.module:function". For `sync_every`, or any parameter that may be an int, ``{ epoch = 2 }`` is the
number of steps in two epochs. Everything else, and any value without an annotation, is passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from hpcsgd.errors import UserError, in_section, located, near_miss, spot
from hpcsgd.named import annotations_of, call_named, require_arguments, resolve

NAME = "name"
"""The key, in the table of a part, whose value names the part."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes parts from the values of a job file.

    `families` maps the type of a part, as parameters are annotated, to functions by name. If the type is
    ``Callable[[…], …]``, a name means the function itself, with arguments bound to it. Otherwise a name means
    what the function returns for the arguments. Functions with a parameter named `steps_per_epoch` or
    `total_steps` get that number by default, if it is known.
    """

    families: Mapping[Any, Mapping[str, Callable[..., Any]]]
    steps_per_epoch: int | None
    """The steps of one epoch; None if their number is not known."""
    total_steps: int | None = None
    """The steps of the whole run; None if their number is not known."""

    def make(self, kind: Any, value: Any, section: str, *keys: str) -> Any:
        """Make the part of type `kind` that `value` names: the value of a section, or of `keys` in it.

        Raises `UserError` with the section and keys if `value` names no part, has wrong arguments or makes
        something else. The exceptions of a user's own function pass unchanged.
        """
        table = self.families[kind]
        at, name, given = _called(value, table, section, *keys)
        with in_section(section, *keys, *at):
            function = resolve(name, table)
        arguments = {k: self._argument(function, v, section, *keys, k) for k, v in given.items()}
        if get_origin(kind) is Callable:
            return _bound(name, function, table, arguments, kind, section, *keys)
        for key, known in (("steps_per_epoch", self.steps_per_epoch), ("total_steps", self.total_steps)):
            if known is not None and key in annotations_of(function):
                arguments.setdefault(key, known)
        with in_section(section, *keys):
            made = call_named(name, function, table, arguments)
            if not isinstance(made, kind):
                raise UserError(f"{name!r} makes a {type(made).__name__}, expected a {kind.__name__}")
        return made

    def _argument(self, function: Callable[..., Any], value: Any, section: str, *keys: str) -> Any:
        """Return the argument of `function` that `value` stands for; the last of `keys` is its parameter."""
        kinds = alternatives(annotations_of(function).get(keys[-1]))
        in_epochs = isinstance(value, dict) and value.keys() == {"epoch"} and type(value["epoch"]) is int
        if int in kinds and in_epochs:
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
                    f"the kind of this value is unknown: the annotation {kinds[0]!r} has names that are not "
                    "there when the job file is read, as those imported under TYPE_CHECKING are not"
                )
        return value


def alternatives(annotation: Any) -> list[Any]:
    """Return the types of a union, or any other annotation alone, without aliases and ``Annotated``."""
    annotation = getattr(annotation, "__value__", annotation)  # the value of `type X = …`
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in alternatives(part)]
    return [annotation]


def _called(
    value: Any, table: Mapping[str, Any], section: str, *keys: str
) -> tuple[tuple[str, ...], str, Mapping[str, Any]]:
    """Return, of the part `value`: the keys to its name (none if `value` is the name), name, arguments."""
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
    """Return `function` with the arguments bound to it, or unchanged if there are no arguments."""
    leading, _ = get_args(kind)
    with in_section(section, *keys):
        require_arguments(function, arguments, len(leading))
    if not arguments:
        return function

    def part(*values: Any) -> Any:
        # the section is left out of errors, because the caller of `part` adds it
        with located(keys[-1], keys[-1]) if keys else in_section(section):
            return call_named(name, function, table, arguments, *values)

    return part
