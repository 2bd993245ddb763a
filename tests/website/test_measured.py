"""Pages have the figures of benchmarks/results.

Other tests check figures of the papers and those of docs/choosing.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from website.checked import NAMES, PAGES
from website.measured import late
from website.measured.looking import says, tables
from website.measured.results import ROOT

NOT_MEASURED = {
    "| Python ≥ 3.11": "versions",
    "| `diloco(I)`, `async_diloco(I)`, `heloco(I)` | 1/I |": "formulas",
    "| `--ranks 64..4096`": "options",
    "| `python benchmarks/sparse_exchange.py": "commands; the last one is a test, which prints its figures",
    "| `build` |": "goals",
    "| 6 M parameters, 4 emulated hosts": "tests/benchmarks/test_crossover.py",
    "| MPI | decided by the MPI library |": "an address",
    "| shared memory, 4 ranks |": "figures of other pages: test_choosing.py",
}
"""The beginnings of tables that are not checked here, with the reasons."""
CASES = [pytest.param(page, of, id=f"{page}-{of.__name__}") for page, each in PAGES.items() for of in each]


@pytest.mark.parametrize(("page", "of"), CASES)
def test_the_page_says_what_was_measured(page: str, of: Callable[[], str]) -> None:
    assert says((ROOT / page).read_text(), of()), of()


@pytest.mark.parametrize(("page", "of"), CASES)
def test_another_number_is_found(page: str, of: Callable[[], str]) -> None:
    changed = (ROOT / page).read_text().translate(str.maketrans("0123456789", "1234567890"))
    assert not says(changed, of())


@pytest.mark.parametrize("page", NAMES)
def test_a_table_with_decimals_is_checked_or_has_a_reason(page: str) -> None:
    known = [re.sub(" +", " ", of()) for of in PAGES.get(page, [])]
    for found in tables((ROOT / page).read_text()):
        if re.search(r"\d\.\d", found) and found not in known:
            assert found.startswith(tuple(NOT_MEASURED)), found


def test_one_changed_cell_and_one_line_too_much_are_found() -> None:
    page = (ROOT / "docs/late.md").read_text()
    assert says(page, late.speed())
    assert not says(page.replace("| 0.509 |", "| 0.508 |"), late.speed())
    assert not says(page.replace("| `bsp` |", "| one more | 0.1 |\n| `bsp` |"), late.speed())
    assert not says("took 12 %", "took 1")
    assert not says("took 112 %", "12 %")
    assert not says("took 1.5 s", "took 1")
