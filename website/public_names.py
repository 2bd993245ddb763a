"""All names that a script may use: those that hpcsgd exports, and those in `graphs` and in `MODULES`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import hpcsgd

MODULES = ("outer_schedules", "quantizers")
"""Modules of parts; scripts write the module's name before that of the part."""


def public() -> dict[str, Any]:
    """Return the public objects by their names, written as after `hpcsgd.`."""
    names = {name: getattr(hpcsgd, name) for name in hpcsgd.__all__}
    graphs = names.pop("graphs")
    inside = {name: value for name, value in vars(graphs).items() if _home(value) == graphs.__name__}
    parts = {
        f"{module}.{name}": getattr(home, name)
        for module, home in [(module, names.pop(module)) for module in MODULES]
        for name in home.__all__
        if not name.isupper()
    }
    return names | {f"graphs.{name}": x for name, x in inside.items() if not name.startswith("_")} | parts


def path(documented: Any) -> str:
    """Return the module and qualified name of the definition."""
    return f"{documented.__module__}.{documented.__qualname__}"


def summary(documented: Any) -> str:
    """Return the first paragraph of the docstring, on one line."""
    return " ".join(inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0].split())


def needed(factory: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without a default."""
    parameters = inspect.signature(factory).parameters.values()
    return [p.name for p in parameters if p.default is p.empty]


def _home(value: Any) -> str | None:
    return value.__module__ if isinstance(value, type | types.FunctionType) else None
