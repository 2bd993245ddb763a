"""Pages show what their commands print, except for parts that depend on the machine."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

import outputs
import programs
from hpcsgd.performance.planning.report import HEAD
from outputs import PAGES, TEXT, Output

PATIENCE = 600.0  # seconds; the machine may be busy
MADE = [
    # Commands with measured numbers may print others on another processor, and run only with the long tests.
    pytest.param(o, id=f"{o.page}-{o.command}", marks=pytest.mark.long if o.differ else pytest.mark.slow)
    for page in PAGES
    for o in outputs.outputs(page)
]


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("output", MADE)
def test_what_is_shown_is_what_is_printed(output: Output, tmp_path: Path) -> None:
    outputs.prepare(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = programs.run(outputs.words(output.command), cwd=tmp_path, env=environment, timeout=PATIENCE)
    printed = output.shortened(done.stdout)
    assert output.comparable(printed) == output.comparable(output.shown), (
        f"{output.page} shows what its command no longer prints: python website/outputs.py makes it again"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_text_says_what_made_it(page: Path) -> None:
    assert outputs.unexplained(page.read_text()) == []


def test_pages_show_the_commands_that_their_outputs_are_of() -> None:
    for page in PAGES:
        text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL).replace("\\\n", " ")
        shown = " ".join(text.split())
        assert [o.command for o in outputs.outputs(page) if o.command not in shown] == [], page.name


def shifted(text: str) -> list[str]:
    """Return the rows of `hpcsgd plan` whose cells do not end where the titles of their columns end."""
    ends = [title.end() for title in re.finditer(r"\S+(?: \S+)*", HEAD)][1:]
    rows = [row for block in TEXT.finditer(text) for row in table_of_a_plan(block["text"].splitlines())]
    return [
        row for row in rows if any(not re.fullmatch(r"\S ?", f"{row} "[end - 1 : end + 1]) for end in ends)
    ]


def table_of_a_plan(lines: list[str]) -> list[str]:
    """Return the rows below the head of the table, except "…"."""
    rows = itertools.takewhile(lambda line: not line.startswith("recommended"), lines[1:])
    return [row for row in rows if row != "…"] if lines[0] == HEAD else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_columns_of_plans_stand_below_their_titles(page: Path) -> None:
    text = page.read_text()
    assert text.count("method  ") == text.count(HEAD)
    assert shifted(text) == []


def test_a_shifted_row_of_a_plan_is_found() -> None:
    text = next(page for page in PAGES if page.name == "plan.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("bsp  "))
    assert shifted(text.replace(row, row.replace("bsp  ", "bsp    "))) == [row.replace("bsp  ", "bsp    ")]


PAGE = """\
<!-- output of `tell a
     story`; 1 … 1; decimals differ -->

```text
P = 4, 3.25 s
…
end
```

```text
by hand
```

<!-- not made again: of a cluster -->
```text
far
```

<!-- a remark -->
```text
remarked
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_block_without_its_making_is_found(page: Path) -> None:
    assert outputs.unexplained(page.read_text()) == ["by hand", "remarked"]


def test_a_page_is_made_again(page: Path) -> None:
    again = outputs.made_again(page, lambda command: "new, 1 s\nmore\nthe " + command[-1])
    assert again == PAGE.replace("P = 4, 3.25 s", "new, 1 s").replace("end", "the story")


def output(differ: str | None) -> Output:
    return Output("page.md", "tell", "", None, differ)


@pytest.mark.parametrize(
    ("differ", "same", "another"),
    [
        (None, "P = 4: 0.25 s\n", "P = 4: 0.26 s\n"),
        ("decimals", "P = 4:  1,234.5  970\n", "P = 2: 0.25 970\n"),
        ("numbers", "b 12%, a 1e-06\n", "c 3%, b 0.1\n"),
    ],
)
def test_what_may_differ(differ: str | None, same: str, another: str) -> None:
    shown = {None: "P = 4: 0.25 s\n", "decimals": "P = 4: 0.25 3,141\n", "numbers": "a 0.5 b 3%,\n"}[differ]
    compared = output(differ).comparable
    assert compared(same) == compared(shown)
    assert compared(another) != compared(shown)
