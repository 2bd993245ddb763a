"""Functions named in a configuration: by a short name from a table, or as "package.module:function"."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from hpcsgd.errors import UserError, in_section, near_miss, shortened

T = TypeVar("T")
UNREADABLE = (NameError, TypeError, AttributeError, SyntaxError)  # errors in the evaluation of an annotation
_CACHES = threading.Lock()  # ranks may be threads, and Python's import caches are not safe without a lock
_KINDS: Mapping[Any, tuple[type, ...]] = {
    **{int: (int,), float: (int, float), str: (str,), bool: (bool,), list: (list, tuple), dict: (dict,)},
}
_LISTS = (list, tuple, Sequence)


def resolve(reference: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function that `reference` names in `table`, or in the module before its colon.

    Modules are found as from a script in the current folder. Raises `UserError` for an unknown name, and for
    a missing module or function. Errors of the module itself during import are not changed.
    """
    if ":" not in reference:
        if reference not in table:
            raise UserError(f'no {reference!r}; {near_miss(reference, table)}, or "package.module:function"')
        return table[reference]
    module_name, _, path = reference.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise UserError(f'{reference!r} is not of the form "package.module:function"')
    return _attribute(_module(module_name, reference), path, reference)


def call(function: Callable[..., Any], arguments: Mapping[str, Any], *leading: Any) -> Any:
    """Return `function(*leading, **arguments)`.

    Raises `UserError`, before the call, if the function's signature does not take these arguments. Errors of
    the function itself are not changed.
    """
    require_arguments(function, arguments, len(leading))
    return function(*leading, **arguments)


def require_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], leading: int = 0) -> None:
    """Raise `UserError` if the function does not take `arguments` after `leading` other values."""
    signature = _signature(function)
    if signature is not None:
        _check(signature, function, arguments, leading)


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the function's parameters, by name.

    An annotation that is a string becomes a type, unless it contains unknown names. A parameter without an
    annotation has `inspect.Parameter.empty`.
    """
    signature = _signature(function)
    return {} if signature is None else {name: p.annotation for name, p in signature.parameters.items()}


def build(
    section: str,
    name: str,
    table: Mapping[str, Callable[..., Any]],
    arguments: Mapping[str, Any],
    kind: type[T],
    *leading: Any,
) -> T:
    """Return the object of type `kind` that the function `name` makes from `arguments`.

    `section` is the section of the job file that has `name` and `arguments`. `table` has the functions with
    short names, and `leading` are positional arguments before `arguments`.

    Raises `UserError`, which names the key, if there is no such function, or if it does not take the
    arguments or returns another kind. Errors of a user's function are not changed.
    """
    with in_section(section, "name"):
        function = resolve(name, table)
    with in_section(f"{section}.arguments"):
        made = call_named(name, function, table, arguments, *leading)
    with in_section(section, "name"):
        if not isinstance(made, kind):
            raise UserError(f"{name!r} returned {type(made).__name__}, expected {kind.__name__}")
    return made


def call_named(
    name: str,
    function: Callable[..., Any],
    table: Mapping[str, Callable[..., Any]],
    arguments: Mapping[str, Any],
    *leading: Any,
) -> Any:
    """Call `function`; if it is from `table`, errors that its arguments cause become a `UserError`."""
    try:
        return call(function, arguments, *leading)
    except UserError:
        raise
    except Exception as error:
        given = shortened(", ".join(f"{key} = {value!r}" for key, value in arguments.items()))
        if name not in table:
            error.add_note(f"{name} was called with {given or 'no arguments'}, as the job file says")
            raise
        if isinstance(error, TypeError | ValueError | RuntimeError):
            raise UserError(f"{name}: {error}") from error
        if isinstance(error, ArithmeticError | AttributeError | LookupError | MemoryError):
            # The messages of these say little without the type and the arguments.
            what = f"{type(error).__name__} ({error}) of {given or 'no arguments'}"
            raise UserError(f"{name}: {what}") from error
        raise


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return a signature with annotations as types where possible; None for built-ins without one."""
    try:
        return inspect.signature(function, eval_str=True)
    except UNREADABLE:
        signature = inspect.signature(function)
    except ValueError:
        return None
    module = sys.modules.get(getattr(function, "__module__", ""), builtins)
    readable = [
        p.replace(annotation=_evaluated(p.annotation, vars(module))) for p in signature.parameters.values()
    ]
    return signature.replace(parameters=readable)


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return a string annotation as a type, or unchanged if it cannot be evaluated."""
    if isinstance(annotation, str):
        with contextlib.suppress(*UNREADABLE):
            return eval(annotation, dict(names))
    return annotation


def _module(name: str, reference: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _CACHES:
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If a module that the user's own module imports is missing, Python's traceback shows the line.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"{reference!r}: no module {error.name!r}, neither installed nor in {here}"
        ) from error


def _attribute(module: ModuleType, path: str, reference: str) -> Callable[..., Any]:
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            callables = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
            raise UserError(f"{reference!r}: no {name!r} in {found.__name__}; {near_miss(name, callables)}")
        found = getattr(found, name)
    if not callable(found):
        raise UserError(f"{reference!r}: is of type {type(found).__name__}, not a function or class")
    return found


def _check(
    signature: inspect.Signature,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    leading: int,
) -> None:
    name = getattr(function, "__name__", repr(function))
    try:
        taken = signature.bind_partial(*[None] * leading).arguments
    except TypeError as error:
        raise UserError(f"{name} takes fewer than the {leading} values that it is called with") from error
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {p.name: p for p in signature.parameters.values() if p.kind in named and p.name not in taken}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for given in arguments:
        if given in taken or (given not in accepted and not takes_any):
            hint = near_miss(given, accepted) if accepted else "it takes none"
            raise UserError(f"{name} has no argument {given!r}; {hint}", key=given)
    needed = [p.name for p in accepted.values() if p.default is p.empty and p.name not in arguments]
    if needed:
        raise UserError(
            f"{name} needs {', '.join(map(repr, needed))}; given: {', '.join(arguments) or 'none'}"
        )
    for given, value in arguments.items():
        plain = _plain(accepted[given].annotation) if given in accepted else []
        if plain and type(value) not in [kind for each in plain for kind in _KINDS[each]]:  # a bool is no int
            expected = " or ".join(kind.__name__ for kind in plain)
            message = f"{name}: {given} = {shortened(repr(value))}: expected {expected}"
            raise UserError(message, key=given, value=value)


def _of_toml(kind: Any) -> Any:
    """Return list for an annotation such as ``Sequence[int]``, dict for a mapping, else `kind` itself."""
    origin = get_origin(kind) or kind
    if origin in _LISTS:
        return list
    return dict if origin in (dict, Mapping) else kind


def _plain(annotation: Any) -> list[type]:
    """Return the types that an annotation allows, without None, if a job file can contain all of them.

    Otherwise return an empty list. None is left out because a job file cannot contain it.
    """
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]
    given = [_of_toml(kind) for kind in kinds if kind is not NoneType]
    return given if all(isinstance(kind, type) and kind in _KINDS for kind in given) else []
