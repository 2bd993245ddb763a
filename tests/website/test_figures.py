"""Every figure in the sentences of pages is checked by a test, or has a reason why no result can have it.

test_measured.py checks those of checked.py, and test_choosing.py those in bold.
"""

from __future__ import annotations

from functools import cache

import pytest

import website.test_choosing as choosing
from website.checked import NAMES, PAGES
from website.figures import unfounded
from website.measured.looking import places
from website.measured.results import ROOT

SETTING = "an option, its default, or a constant"
OF_THE_RUN = "a setting of the benchmark"
OF_THE_PAPER = "the paper's values"
NOT_MEASURED = {
    "README.md": {"`KillWait` (30 s)": "Slurm's default"},
    "benchmarks/README.md": {
        "`--heartbeat-timeout` of 1 s": OF_THE_RUN,
        "The outer momentum (0.8)": OF_THE_RUN,
        "at most 1.02 (4 groups) and 1.06 (8 groups)": "goals of a result that is not there yet",
        "With an outer momentum of 0.9": OF_THE_RUN,
        "a rate of 0.01, 30 epochs": OF_THE_RUN,
        "(32, 0.05, 12 epochs)": OF_THE_RUN,
    },
    "docs/choosing.md": {"within 3 %, and lose nothing": "what the last column of the table means"},
    "docs/cluster.md": {"`srun` 22.05 and `prterun` 5.0": "versions"},
    "docs/data.md": {"`smallest` (0.08)": SETTING, "each 2 or 4 times": SETTING},
    "docs/diloco.md": {
        "MuLoCo's rate of 0.9 and momentum of 0.8; with 16 groups or more, 1.0 and 0.9.": OF_THE_PAPER,
        "its authors use 0.8 and 0.9": OF_THE_PAPER,
        "a momentum above 0.9": "advice",
    },
    "docs/ensemble.md": {
        "up to 3 times (`--max-restarts`)": SETTING,
        "`--heartbeat-timeout` (10 s)": SETTING,
        "`--timeout` (300 s)": SETTING,
        "5 seconds more for the rest": SETTING,
    },
    "docs/guarantees.md": {"a timeout of 600 s": SETTING},
    "docs/machine.md": {
        "64 MB (`--max-bytes`)": SETTING,
        "below 50 ns, β slower than 1 MB/s or faster than 10 TB/s": SETTING,
        "an error larger by 0.5": SETTING,
    },
    "docs/plan.md": {"at least 50 %": SETTING},
    "docs/security.md": {"within 10 s is closed": SETTING},
    "docs/selsync.md": {"δ = 0.5, about 300 steps": OF_THE_RUN},
    "docs/shard.md": {"6.0 million parameters in twelve blocks": OF_THE_RUN},
    "docs/simulate.md": {"up to 0.25 s": SETTING},
    "docs/sparse.md": {
        "at most 0.5 % per step": SETTING,
        "density 0.01:": OF_THE_RUN,
        "(d = 0.01, 3000 steps), an LSTM on WikiText-2 (0.001, 15 000 steps)": OF_THE_RUN,
        "(0.1, 800 steps)": OF_THE_RUN,
    },
    "docs/troubleshooting.md": {"`[parallel] timeout_s` (600 s)": SETTING},
    "docs/wires.md": {"1.4 times the mean magnitude": SETTING},
}
"""By page: passages with figures that no result can have, with the reasons."""


def passages(name: str) -> list[range]:
    """Return the passages of a page whose figures are checked, or need no check."""
    page = text(name)
    known = [*(of() for of in PAGES.get(name, [])), *NOT_MEASURED.get(name, {})]
    bold = choosing.FIGURE.finditer(page) if name in choosing.PAGES else ()
    found = [place for words in known if not words.startswith("|") for place in places(page, words)]
    return found + [range(*each.span()) for each in bold]


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_checked_or_have_a_reason(name: str) -> None:
    assert unfounded(text(name), passages(name)) == []


@pytest.mark.parametrize("name", NOT_MEASURED)
def test_passages_that_need_no_check_are_there_and_have_figures(name: str) -> None:
    page = text(name)
    for words in NOT_MEASURED[name]:
        (place,) = places(page, words)
        assert unfounded(page[place.start : place.stop], []) != [], words


PAGE = """\
Steps take 12 % longer (arXiv:2407.12345), with MPICH 5.0 and `--rate 0.5`, and send
1.5 MB at 100 Mbit/s in 3 to 4 s.

| a | 0.5 |

    0.25 s
"""


def test_a_figure_that_nothing_checks_is_found() -> None:
    assert len(unfounded(PAGE, [])) == 3
    first, *others = (next(places(PAGE, words)) for words in ("take 12 % longer", "1.5 MB", "3 to 4 s"))
    assert len(unfounded(PAGE, [first])) == 2
    assert unfounded(PAGE, [first, *others]) == []
