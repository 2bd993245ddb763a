"""Training of neural networks on supercomputers with far less communication.

topology = hpcsgd.init(groups=4)
loader = DataLoader(data, batch, sampler=hpcsgd.Sampler(data, topology))
optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method=hpcsgd.hierarchical(sync_every=8))

In the examples of docstrings four ranks have a `topology` of 2 groups of 2, with a small `model`, plain SGD
as its `optimizer`, `data`, a `criterion`, an empty `folder`, and `train(optimizer, steps)`, which is the
training loop of the README.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from hpcsgd import uncaught
from hpcsgd.renamed import OF_OTHERS, new_name


def _homes(file: Path) -> dict[str, str]:
    """Return the module of each public name, read from the imports in `file`.

    `__init__.pyi` has the only list of public names, because type checkers read it. It imports methods with
    ``*``. The names of methods are those that `__init__.py` of their package imports with ``as``.
    """
    found: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            module = str(node.module)
            if node.names[0].name == "*":
                package = Path(__file__).parent.joinpath(*module.split(".")[1:])
                found |= _homes(package / "__init__.py")
            found |= {alias.name: module for alias in node.names if alias.asname}
    return found


_HOMES = _homes(Path(__file__).with_suffix(".pyi"))
__all__ = sorted(_HOMES)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll] - the stub says which


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that `hpcsgd --help` does not import torch."""
    if name not in _HOMES:
        meant = new_name(name, _HOMES)
        hint = f"; it has been renamed to {meant!r}" if meant else ""
        hint = f"; use {OF_OTHERS[name]!r} instead" if name in OF_OTHERS else hint
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    if _HOMES[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(__import__(_HOMES[name], fromlist=[name]), name)  # imports `name` if it is a module


def __dir__() -> list[str]:
    """Return all names for completion at the prompt, including those that are not imported yet."""
    return sorted({*globals(), *_HOMES})


uncaught.watch()
