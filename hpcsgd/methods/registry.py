"""The registry of methods by name. `@method` adds the decorated function when its file is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hpcsgd.core.method import Method

F = TypeVar("F", bound=Callable[..., Method])

METHODS: dict[str, Callable[..., Method]] = {}
"""The functions that make methods, by name, in alphabetical order."""
PAPERS: dict[str, str] = {}
"""The citation of each method's paper, by the method's name.

A citation is a BibTeX entry, or the key of an entry in ``papers.bib`` if other parts cite the paper, too.
It is empty for a method without a paper.
"""
DELAYABLE: set[str] = set()
"""The names of the methods that `delayed` accepts if their optional arguments have the default values."""


def method(*, cite: str = "", delayable: bool = False) -> Callable[[F], F]:
    """Return a decorator that registers a function as the method of its name, with the citation `cite`.

    The names in job files, the public names, the citations and the website's pages are made from this
    registry.
    """

    def enter(factory: F) -> F:
        named: Any = factory
        name: str = named.__name__
        METHODS[name], PAPERS[name] = factory, cite.strip()
        for each in sorted(METHODS):
            METHODS[each] = METHODS.pop(each)
        if delayable:
            DELAYABLE.add(name)
        return factory

    return enter
