"""The fingerprint of a training is the same each time, and another training has a different one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bits
from hpcsgd.methods import METHODS
from methods.table import EXCEPTIONS, REFERENCES

NAMES = ["hierarchical"]


@pytest.mark.slow
def test_they_are_the_same_each_time_and_others_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    assert bits.main([*NAMES, "--json", str(before)]) == 0
    found = json.loads(before.read_text())
    assert len(found) == len(set(found.values())) == len(NAMES) * len(bits.SHAPES) * len(bits.OPTIMIZERS)
    assert bits.main([*NAMES, "--against", str(before)]) == 0
    (first, *_) = found
    before.write_text(json.dumps({**found, first: "another one"}))
    assert bits.main([*NAMES, "--against", str(before)]) == 1
    assert f"other than before: {first}\n" in capsys.readouterr().out


def test_every_method_has_one_unless_it_goes_by_arrival() -> None:
    covered = {case.method for label, case in REFERENCES.items() if label in bits.ENTRIES}
    by_arrival = {exempt.method for exempt in EXCEPTIONS.values()}
    assert covered | by_arrival == set(METHODS)
    assert covered.isdisjoint(by_arrival)
