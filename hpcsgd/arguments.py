"""A check of the arguments of public calls against annotations; its messages have one line.

`checked` wraps the public functions and classes. It reads a signature at the first call, and checks the
arguments of every call. It wraps calls that make objects, but no calls that are made in every step. A scalar
of numpy, or a tensor with one number and no dimensions, is passed on as a Python number. An annotation may
allow more than the function does, such as ``int`` for a count. Then the function itself checks the range.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from hpcsgd.errors import UserError, near_miss, shortened
from hpcsgd.makers import call_of, makers_of, near_maker

F = TypeVar("F", bound=Callable[..., Any])
_JOB = "what hpcsgd.init(groups=…) returns"
WORDS: Mapping[str, str] = {
    "Dataset": "a dataset, whose samples have numbers",
    "Topology": _JOB,
    "Assignment": _JOB,
    "Module": "the torch.nn.Module itself",
    "NoneType": "None",
    "Optimizer": "a torch optimizer that has been made, as torch.optim.SGD(model.parameters(), lr=0.1)",
    "PathLike": "a path",
    "Sampler": "hpcsgd.Sampler(data, topology), in which another sampler may stand in place of data",
    "Sized": "a dataset with a length (what is read as a stream takes no sampler: each rank reads a part)",
    "bool": "True or False",
    "dtype": "a torch.dtype",
    "float": "a number",
    "int": "a whole number",
    "ndarray": "an array",
    "str": "a string",
}
"""What an error line calls the values of a class, by the name of the class."""
EXACT = 2**53
"""Largest int that stays an int where a float is expected; floats represent all ints up to it exactly."""
SWITCHES: Mapping[Any, bool] = {
    **dict.fromkeys(["yes", "true", "on", "1", 1], True),
    **dict.fromkeys(["no", "false", "off", "0", "", 0], False),
}


def checked(api: F) -> F:
    """Make a function, or the `__init__` of a class, raise `UserError` for wrong arguments.

    An argument is wrong if it is of another kind than its annotation says, or if it does not exist.
    """
    if isinstance(api, type):
        made: Any = api
        made.__init__ = _around(made.__init__, made.__name__)
        return made
    return cast(F, _around(api, api.__name__))


def of_kind(call: str, key: str, kind: Any, value: Any) -> Any:
    """Return `value` if it is of `kind`, else raise `UserError` about the argument `key` of `call`.

    This is for calls that are made in every step, for which `checked` would take too long.
    """
    if type(value) is kind and not (kind is float and math.isnan(value)):
        return value
    try:
        return fit(kind, value)
    except ValueError:
        message = f"{call}: {key} = {shown(value)}: expected {_expected(kind)}{_hint(kind, value)}"
        raise UserError(message, key=key, value=value) from None


def shown(value: object) -> str:
    """Return a short text for the value of an argument, for error lines."""
    if isinstance(value, type | FunctionType):
        return value.__name__
    if value is None or isinstance(value, str | int | float):
        return shortened(repr(value))
    if isinstance(value, list | tuple | dict | set) and len(text := repr(value)) <= 60 and "\n" not in text:
        return text
    return f"an object of type {type(value).__name__}"


def _around(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.cache
    def signature() -> inspect.Signature:
        return inspect.signature(function, eval_str=True)

    @functools.wraps(function)
    def call(*given: Any, **by_name: Any) -> Any:
        bound = _bound(signature(), name, given, by_name)
        for key, value in bound.arguments.items():
            parameter = signature().parameters[key]
            if parameter.kind is parameter.VAR_POSITIONAL:
                bound.arguments[key] = tuple(_fitting(parameter, each, bound, name) for each in value)
            elif parameter.kind is not parameter.VAR_KEYWORD:
                bound.arguments[key] = _fitting(parameter, value, bound, name)
        return function(*bound.args, **bound.kwargs)

    return call


def _bound(
    signature: inspect.Signature, name: str, given: Sequence[Any], by_name: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        return signature.bind(*given, **by_name)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values() if p.name != "self"]
        unknown = [key for key in by_name if key not in names]
        if unknown:
            hint = near_miss(unknown[0], names) if names else "it takes none"
            message = f"{name} has no argument {shortened(unknown[0])!r}; {hint}"
            raise UserError(message, key=unknown[0]) from None
        raise UserError(f"{name}: {error}; expected {name}{_in_order(signature)}") from None


def _in_order(signature: inspect.Signature) -> str:
    """Return the required arguments, such as ``(optimizer, model, topology, method)``."""
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.name != "self"]
    return f"({', '.join(p.name for p in needed if p.kind is not p.VAR_KEYWORD)})"


def _fitting(parameter: inspect.Parameter, value: Any, bound: inspect.BoundArguments, name: str) -> Any:
    kind = parameter.annotation
    try:
        return fit(kind, value)
    except ValueError:
        for other, theirs in bound.arguments.items():
            asked = bound.signature.parameters[other].annotation
            if (
                other not in (parameter.name, "self")
                and _is(asked, value)
                and _is(kind, theirs)
                and _is_object(asked)
            ):
                raise UserError(
                    f"{parameter.name} and {other} are swapped: expected {name}{_in_order(bound.signature)}"
                ) from None
        message = f"{name}: {parameter.name} = {shown(value)}: expected {_expected(kind)}{_hint(kind, value)}"
        raise UserError(message, key=parameter.name, value=value) from None


def fit(kind: Any, value: Any) -> Any:
    """Return `value`, a number as a Python number, if it is of `kind`; else raise `ValueError`."""
    if kind is Any or kind is inspect.Parameter.empty or isinstance(kind, TypeVar | str):
        return value
    if kind in (int, float, bool):
        return _number(kind, value)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _first_fit(inner, value)
    if origin is Literal:
        return _required(value, isinstance(value, str) and value in inner)
    if kind is str:
        return _required(value, isinstance(value, str))
    return _of_class(origin or kind, inner, value)


def _of_class(kind: Any, inner: Sequence[Any], value: Any) -> Any:
    if kind is Callable:
        return _required(value, callable(value))
    if isinstance(value, type) and kind is not type:
        raise ValueError  # a class has all members of a protocol, but is not an instance of it
    if getattr(value, "ndim", None) == 0 and kind.__name__ != "Tensor":
        raise ValueError  # a single number also has the members of containers
    if kind is Sequence and getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()  # an array of numpy or a tensor
    if kind.__name__ == "Optimizer" and hasattr(value, "param_groups"):
        return value  # it may wrap an optimizer: the function that takes it checks that
    if kind.__name__ in ("Dataset", "Iterable") and not isinstance(value, str | bytes | dict):
        return _required(value, hasattr(value, "__getitem__") or isinstance(value, kind))
    if isinstance(value, str | bytes) or not isinstance(value, kind):
        raise ValueError
    found: Any = value
    if kind is Sequence and not all(type(each) is inner[0] for each in found):
        return [fit(inner[0], each) for each in found]
    if kind is Mapping:
        return {fit(inner[0], key): fit(inner[1], each) for key, each in found.items()}
    return found


def _first_fit(kinds: Sequence[Any], value: Any) -> Any:
    for kind in kinds:
        try:
            return fit(kind, value)
        except ValueError:
            continue
    raise ValueError


def _number(kind: type, value: Any) -> Any:
    """Return `value` as an int, float or bool, as `kind` says, or raise `ValueError`; NaN is no number."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a number of numpy or torch
    if isinstance(value, bool) or kind is bool:
        return _required(value, kind is bool and isinstance(value, bool))
    if kind is int:
        return int(_required(value, isinstance(value, int)))
    if isinstance(value, int):
        return value if abs(value) <= EXACT else _required(float(value), abs(value) <= sys.float_info.max)
    return _required(value, isinstance(value, float) and not math.isnan(value))


def _required(value: Any, holds: bool) -> Any:
    if not holds:
        raise ValueError
    return value


def _is(kind: Any, value: Any) -> bool:
    try:
        fit(kind, value)
    except ValueError:
        return False
    return True


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and kind not in (int, float, bool, str)


def _expected(kind: Any) -> str:
    """Return in words what the annotation `kind` allows, such as ``a whole number or None``."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_expected(each) for each in inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is Callable:
        made = inner[1] if inner and inspect.isclass(inner[1]) else object
        return "a function" if made is object else f"a function that returns {_one(made.__name__)}"
    if origin in (Sequence, Iterable, Mapping) and inner[-1] in (int, str):
        kind_of_list = "dict" if origin is Mapping else "list"
        return f"a {kind_of_list} of {'whole numbers' if inner[-1] is int else 'strings'}"
    name = _name(kind)
    return WORDS.get(name) or _one(name)


def _one(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _name(kind: Any) -> str:
    return (NoneType if kind is None else get_origin(kind) or kind).__name__


def _hint(kind: Any, value: Any) -> str:
    """Return the end of an error line: what was probably meant, or a call that makes a `kind`."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for each in kinds:
        if (meant := _meant(each, value)) is not None:
            return f": did you mean {meant}?"
        if (lacking := _lacking(each, value)) is not None:
            return f": it has no {lacking}"
    makers = [maker for each in kinds if _name(each) not in WORDS for maker in makers_of(each)]
    if not makers:
        return ""
    if (near := near_maker(value, makers)) is not None:
        return f", which a call makes: did you mean {call_of(near)}?"
    return f", as {call_of(makers[0])} makes it; allowed: {', '.join(maker for maker in makers)}"


def _lacking(kind: Any, value: Any) -> str | None:
    """Return the member of hpcsgd's protocol `kind`, with its type, if `value` lacks only that; else None."""
    if isinstance(value, type | str) or not getattr(kind, "_is_protocol", False):
        return None
    members = {
        name: member
        for protocol in reversed(kind.__mro__)
        if protocol.__module__.startswith(f"{__package__}.")
        for name, member in vars(protocol).items()
        if name == "__call__" or not name.startswith("_")
    }
    missing = [name for name in members if not hasattr(value, name)]
    if len(members) == 1 or len(missing) != 1:
        return None
    member = members[missing[0]]
    wanted = member.fget.__annotations__.get("return") if isinstance(member, property) else None
    return missing[0] if wanted is None else f"{missing[0]}, expected {_one(wanted)}"


def _meant(kind: Any, value: Any) -> object | None:
    """Return the number or bool, as `kind` says, that the user probably meant by `value`; None if unknown."""
    if kind is bool and isinstance(value, str | int):
        return SWITCHES.get(value.strip().lower() if isinstance(value, str) else value)
    if kind in (int, float) and isinstance(value, str | float) and len(str(value)) < 20:
        try:
            number = float(value)
        except ValueError:
            return None
        if number.is_integer():
            return int(number)
        return number if kind is float and math.isfinite(number) else None
    return None
