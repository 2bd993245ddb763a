"""The table of methods by name. The functions that make them enter themselves as they are imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hpcsgd.core.method import Method

F = TypeVar("F", bound=Callable[..., Method])

METHODS: dict[str, Callable[..., Method]] = {}
"""In alphabetical order."""
PAPERS: dict[str, str] = {}
"""By the names of methods: the BibTeX entry of the paper, or the key of one in ``papers.bib``, where other
parts cite that paper, too. Where no paper had to say it, it is empty."""
DELAYABLE: set[str] = set()
"""The methods whose groups may train on while they average, with the defaults of their arguments."""


def method(*, cite: str = "", delayable: bool = False) -> Callable[[F], F]:
    """Enter the function below, and its paper, as the method of its name.

    The names in job files, the public names, the citations and the pages of the site are made from this.
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
