"""The table of short names that a job file may use, generated from the tables with which it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcsgd.config.parts import alternatives
from hpcsgd.data.partition import PARTITIONS
from hpcsgd.methods import METHODS
from hpcsgd.models import MODELS
from hpcsgd.named import annotations_of
from hpcsgd.train.families import FAMILIES
from hpcsgd.train.training_setup import TRANSFORMS

HEAD = """
## Names

These names may stand in the place of `"package.module:function"`. The rows below those of the sections are
for arguments of methods and of their parts.

| key | names |
|---|---|
"""


def table() -> str:
    rows = {"[method] name": METHODS, "[model] name": MODELS, "[data] transform": TRANSFORMS}
    rows |= {"[data] partition": PARTITIONS}
    listed = "".join(f"| `{key}` | {_listed(known)} |\n" for key, known in rows.items())
    families = {_listed(arguments): known for arguments, known in families_of_arguments()}
    return (
        HEAD + listed + "".join(f"| ({of}) | {_listed(known)} |\n" for of, known in sorted(families.items()))
    )


def families_of_arguments() -> Iterable[tuple[set[str], Mapping[str, Callable[..., Any]]]]:
    """Yield the names of arguments that take a part, with the named parts that they can take."""
    tables = list({id(known): known for known in FAMILIES.values()}.values())
    takers = [function for known in tables for function in known.values()]
    for known in tables:
        yield {name for function in takers for name in taking(function, known)}, known


def taking(function: Callable[..., Any], known: Mapping[str, Callable[..., Any]]) -> Iterable[str]:
    """Yield the arguments of `function` that take one of `known`."""
    for name, kind in annotations_of(function).items():
        if any(FAMILIES.get(x) is known for x in alternatives(kind)):
            yield name


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
