"""All names that a script may use: the exported ones, `graphs` and `quantizers` with what is in them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import hpcsgd


def public() -> dict[str, Any]:
    """Each as it is written after `hpcsgd.`."""
    names = {name: getattr(hpcsgd, name) for name in hpcsgd.__all__}
    graphs, quantizers = names.pop("graphs"), names.pop("quantizers")
    inside = {name: value for name, value in vars(graphs).items() if _home(value) == graphs.__name__}
    formats = {
        f"quantizers.{name}": getattr(quantizers, name) for name in quantizers.__all__ if not name.isupper()
    }
    return names | {f"graphs.{name}": x for name, x in inside.items() if not name.startswith("_")} | formats


def path(documented: Any) -> str:
    """Where it is written."""
    return f"{documented.__module__}.{documented.__qualname__}"


def summary(documented: Any) -> str:
    """The first sentence or paragraph of its docstring, on one line."""
    return " ".join(inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0].split())


def needed(factory: Callable[..., Any]) -> list[str]:
    """Its arguments without a default."""
    parameters = inspect.signature(factory).parameters.values()
    return [p.name for p in parameters if p.default is p.empty]


def _home(value: Any) -> str | None:
    return value.__module__ if isinstance(value, type | types.FunctionType) else None
