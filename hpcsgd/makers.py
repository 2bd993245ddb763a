"""A search for public calls that make objects of a type, for error messages about wrong arguments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from types import FunctionType, ModuleType
from typing import Any


def makers_of(kind: Any) -> list[str]:
    """Return the names, without ``hpcsgd.``, of the public calls that make an object of type `kind`.

    Classes come before functions. The list is empty if `kind` is not a type of hpcsgd.
    """
    if not isinstance(kind, type) or not kind.__module__.startswith(f"{__package__}."):
        return []
    found = [name for name, api in _public() if api is not kind and _makes(api, kind)]
    return [name for name in found if not name.islower()] + [name for name in found if name.islower()]


def near_maker(given: object, makers: Sequence[str]) -> str | None:
    """Return the maker that the user meant by `given`, or None.

    `given` may be a function or class that was not called, or a string. `makers` has the known names.
    """
    name = given if isinstance(given, str) else None
    if isinstance(given, type | FunctionType):
        name = given.__name__
    if name is None:
        return None
    last = {maker.rpartition(".")[2].lower(): maker for maker in makers}
    close = get_close_matches(name.lower().replace("-", "_"), last, n=1)
    return last[close[0]] if close else None


def call_of(maker: str) -> str:
    """Return a call such as ``hpcsgd.hierarchical(sync_every=…)``, with the required arguments."""
    parameters = inspect.signature(dict(_public())[maker]).parameters.values()
    needed = [f"{p.name}=…" for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return f"{__package__}.{maker}({', '.join(needed)})"


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield all exported names, and the names in exported modules."""
    package = sys.modules[str(__package__)]
    for name in package.__all__:
        api = getattr(package, name)
        if not isinstance(api, ModuleType):
            yield name, api
            continue
        for inner, value in vars(api).items():
            if isinstance(value, type | FunctionType) and not inner.startswith("_"):
                yield f"{name}.{inner}", value


def _makes(api: Callable[..., Any], kind: type) -> bool:
    if not isinstance(api, type):
        return getattr(api, "__annotations__", {}).get("return") == kind.__name__
    if getattr(api, "_is_protocol", False):
        return False
    if not getattr(kind, "_is_protocol", False):
        return issubclass(api, kind)
    wanted = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    return bool(wanted) and all(hasattr(api, name) for name in wanted)
