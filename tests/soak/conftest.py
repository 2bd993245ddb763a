"""Cases that are drawn by a number, of which the one that fails is told, so that it can be had again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

OPTION = "--soak-seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=int, default=None, help="only the case of this number, in tests/soak")


@dataclass(frozen=True)
class Seeds:
    """Those of one test, or the one that was asked for."""

    test: str
    asked: int | None

    def each(self, cases: int, case: Callable[[int], object]) -> None:
        """`case(seed)` for seeds 0, 1, …; what it raises says how to have it again."""
        given: Iterable[int] = range(cases) if self.asked is None else [self.asked]
        for seed in given:
            try:
                case(seed)
            except BaseException as error:
                error.add_note(f"this is case {seed}: pytest '{self.test}' {OPTION} {seed}")
                raise


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Seeds:
    return Seeds(request.node.nodeid, request.config.getoption(OPTION, None))
