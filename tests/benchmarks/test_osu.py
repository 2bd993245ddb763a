"""The output of the OSU micro-benchmarks, with which our times are compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alpha_beta.osu import nearest, parsed, seconds

PRINTED = """
# OSU MPI All-to-All Personalized Exchange Latency Test v7.4
# Datatype: MPI_CHAR.
# Size       Avg Latency(us)
4                       1.25
1048576              2000.50
"""


def test_what_is_printed_is_read() -> None:
    assert parsed(PRINTED) == pytest.approx({4: 1.25e-6, 1048576: 2.0005e-3})


def test_a_size_nearby_will_do() -> None:
    assert nearest({8: 1.0, 64: 2.0, 70: 3.0}, 66) == 2.0
    assert nearest({8: 1.0, 64: 2.0}, 16) is None
    assert nearest({}, 16) is None


def test_sizes_of_a_part_are_reported_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program is in PATH and prints what they print, and another one is missing."""
    program = tmp_path / "osu_alltoall"
    program.write_text(f"#!/bin/sh\ncat <<EOF\n{PRINTED}EOF\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert seconds(1, 1 << 20) == {"alltoall": pytest.approx({4: 1.25e-6, 1048576: 2.0005e-3})}
    assert seconds(2, 1 << 20)["alltoall"].keys() == {8, 2097152}
