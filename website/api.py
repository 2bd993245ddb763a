"""The pages of the API reference: the docstring of every public name, rendered by mkdocstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import hpcsgd
from hpcsgd.methods import METHODS
from public_names import path, public, summary

TITLES = {
    "training": "Training",
    "methods": "Methods",
    "gradients": "Averaging gradients",
    "averagers": "Averagers",
    "graphs": "Graphs for gossip",
    "quantizers": "Wire formats",
    "outer_schedules": "Outer schedules",
    "data": "Samples",
}
"""The titles of the index's sections, in their order; those of the pages begin with "API: "."""
PAGES = {
    "hpcsgd.parts.averagers": "averagers",
    "hpcsgd.core.graphs": "graphs",
    "hpcsgd.data": "data",
    "hpcsgd.parts.grad_reduces": "gradients",
    "hpcsgd.parts.sparsifiers": "gradients",
    "hpcsgd.parts.quantizers": "quantizers",
    "hpcsgd.parts.outer_schedules": "outer_schedules",
}
"""The page of a name, by the package that defines it; all other names are on the page `training`."""


def pages() -> dict[str, str]:
    """Return the pages by path. Methods have their own pages (method_pages.py)."""
    names = public()
    made = {page: [name for name in names if page_of(name, names[name]) == page] for page in TITLES}
    return {"api/index.md": _index(names, made)} | {
        f"api/{page}.md": f"# {_title(page)}\n\n" + "\n".join(entry(name, names[name]) for name in some)
        for page, some in made.items()
        if page != "methods"
    }


def _title(page: str) -> str:
    """Return a title that is clear in a list of search results, where "Training" alone would not be."""
    return f"API: {TITLES[page][0].lower()}{TITLES[page][1:]}"


def page_of(name: str, documented: Any) -> str:
    if name in METHODS:
        return "methods"
    home = documented.__module__
    return next((page for start, page in PAGES.items() if f"{home}.".startswith(f"{start}.")), "training")


def entry(name: str, documented: Any) -> str:
    """Return the lines from which mkdocstrings makes an entry, below an anchor with the public name."""
    public_name = f"hpcsgd.{name}"
    return f"[](){{#{public_name}}}\n\n::: {path(documented)}\n    options:\n      heading: {public_name}\n"


def _index(names: Mapping[str, Any], made: Mapping[str, Iterable[str]]) -> str:
    _, _, setting = inspect.cleandoc(hpcsgd.__doc__ or "").rpartition("\n\n")
    text = f"# API reference\n\nAll that a script needs is in `hpcsgd`. {setting}\n"
    for page, some in made.items():
        rows = (f"| [`{x}`]({_file(page, x)}#hpcsgd.{x}) | {summary(names[x])} |\n" for x in some)
        text += f"\n## {TITLES[page]}\n\n| | |\n|---|---|\n{''.join(rows)}"
    return text


def _file(page: str, name: str) -> str:
    return f"../methods/{name}.md" if page == "methods" else f"{page}.md"
