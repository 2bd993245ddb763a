"""Several threads search for torch's wrappers at once."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import pytest
from torch import nn

from hpcsgd.engine import around_model


def test_a_search_does_not_disturb_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds all objects that refer to these classes, even those that Python makes for another."""
    found: list[object] = []
    with_subclasses = around_model._with_subclasses

    def while_another_searches(kinds: Iterable[type[nn.Module]]) -> Iterator[type[nn.Module]]:
        for kind in with_subclasses(kinds):
            yield kind
            found.append(gc.get_referrers(kind))

    monkeypatch.setattr(around_model, "_with_subclasses", while_another_searches)
    assert around_model._around(set()) is None
    assert found
