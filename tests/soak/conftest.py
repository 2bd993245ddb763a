"""The fixture and the option that draw test cases by a seed, so that a failing case can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

OPTION = "--soak-seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=int, default=None, help="only the case of this number, in tests/soak")


@dataclass(frozen=True)
class Seeds:
    """The seeds of one test, or only the one that the option selects."""

    test: str
    asked: int | None

    def each(self, cases: int, case: Callable[[int], object]) -> None:
        """Call `case(seed)` for seeds 0, 1, …; add a note to any error that says how to repeat the case."""
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
