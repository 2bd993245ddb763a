"""Tests that the shared memory of killed ranks is found by the name that MPICH gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.cluster.launch.leftovers import clear, fnv


@pytest.mark.parametrize(("text", "value"), [("", "811c9dc5"), ("a", "e40c292c"), ("foobar", "bf9cf968")])
def test_the_hash_is_that_of_its_authors(text: str, value: str) -> None:
    """The values are published test vectors of FNV-1a with 32 bits."""
    assert fnv(text) == value


def test_only_this_job_is_forgotten(tmp_path: Path) -> None:
    gone = [tmp_path / f"mpich_shm_{fnv(step)}_{part}" for step in ("17.0", "17.999") for part in (0, 12)]
    kept = [tmp_path / f"mpich_shm_{fnv('18.0')}_0", tmp_path / f"other_{fnv('17.0')}_0"]
    for path in (*gone, *kept):
        path.touch()
    clear("17", tmp_path)
    assert set(tmp_path.iterdir()) == set(kept)
