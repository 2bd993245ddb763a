"""Tests of the block of values in a script, and of the text that stays unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

import programs
from hpcsgd.cluster.batch.script import SBATCH, fill, template
from hpcsgd.errors import UserError

TEXT = """#!/bin/bash
#SBATCH --not=touched
# --- values ---
#SBATCH --nodes=1
#SBATCH --requeue
RUN=  # where
SRUN=()  # options
# --------------
RUN=after
"""


def test_options_and_values_are_replaced() -> None:
    text = fill(TEXT, {"nodes": "4"}, {"RUN": "runs/x", "SRUN": ["--a", "b c"]})
    assert text == TEXT.replace("nodes=1", "nodes=4").replace("RUN=  #", "RUN=runs/x  #").replace(
        "SRUN=()", "SRUN=(--a 'b c')"
    )


def test_names_of_one_letter_have_one_dash() -> None:
    lines = [SBATCH.line(name, value) for name, value in {"C": "gpu&a100", "H": "", "time": "1:00"}.items()]
    assert lines == ["#SBATCH -C 'gpu&a100'", "#SBATCH -H", "#SBATCH --time=1:00"]


def test_options_are_added_after_the_others() -> None:
    assert "#SBATCH --requeue\n#SBATCH --account=us\n#SBATCH --exclusive\nRUN=" in fill(
        TEXT, {"account": "us", "exclusive": ""}, {}
    )


def test_an_option_is_not_taken_for_another() -> None:
    text = fill(TEXT, {"node": "x"}, {})
    assert "--nodes=1\n" in text
    assert "--node=x\n" in text


def test_backslashes_and_quotes_stay() -> None:
    text = fill(TEXT, {"comment": r"a \1 'b'"}, {"RUN": r"C:\1"})
    assert r"RUN='C:\1'  # where" in text


@pytest.mark.parametrize("letter", ["\n", "\r", "\0", "\x1b", "\x85", "\u2028", "\udcff"])
@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"job-name": "a{}touch b"}, {}),
        ({"a{}touch b": "x"}, {}),
        ({}, {"RUN": "a{}touch b"}),
        ({}, {"SRUN": ["--x", "a{}touch b"]}),
    ],
)
def test_words_that_would_end_a_line_are_refused(
    options: dict[str, str], values: dict[str, str | list[str]], letter: str
) -> None:
    def told(word: str) -> str:
        return word.format(letter)

    with pytest.raises(UserError, match="cannot stand in a batch script"):
        fill(
            TEXT,
            {told(name): told(value) for name, value in options.items()},
            {name: told(v) if isinstance(v, str) else [*map(told, v)] for name, v in values.items()},
        )


@pytest.mark.parametrize("kind", ["train", "bench", "measure", "probe", "ensemble"])
def test_templates_are_scripts_as_they_stand(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(template(f"{kind}.sbatch"))
    programs.run(["bash", "-n", script])
    values = {"JOB": [], "PYTHON": "p", "MODULES": ["m"], "SETUP": "s", "MPI": "x", "SRUN": [], "RUN": "r"}
    values |= {"BIND": ["--cpu-bind=none"], "ENVIRONMENT": ["A=b c"]}
    script.write_text(fill(template(f"{kind}.sbatch"), {"nodes": "2"}, values))
    programs.run(["bash", "-n", script])
