"""After ten thousand steps a rank uses no more memory, tensors, threads and files than near the beginning.

A line is fitted to the samples of each quantity after the warm-up. The quantity grows if the slope is more
than three times its standard error and exceeds `LIMITS`. Smaller slopes are below a megabyte in ten thousand
steps, and below a file or a thread in a thousand steps.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import programs
from hpcsgd.methods import METHODS
from pythons import HERE
from soak.sizes import ENOUGH
from soak.steps import ENTRIES, RANKS, Sample, first_of_each
from train.launches import unlaunched

STEPS, SOME_STEPS = 10_000, 96
LIMITS = {"bytes": 100.0, "tensors": 0.01, "threads": 0.001, "files": 0.001}
"""The largest slopes that are allowed, per step."""
NOISE = 2**20
"""Bytes by which allocators may change the memory in use during a whole run."""


def fit(samples: Sequence[Sample], what: str) -> tuple[float, float]:
    """Return the slope of the least-squares line and its standard error."""
    t, y = ([float(sample[key]) for sample in samples] for key in ("step", what))
    n, mean_t, mean_y = len(t), math.fsum(t) / len(t), math.fsum(y) / len(y)
    spread = math.fsum((a - mean_t) ** 2 for a in t)
    slope = math.fsum((a - mean_t) * (b - mean_y) for a, b in zip(t, y, strict=True)) / spread
    rest = math.fsum((b - mean_y - slope * (a - mean_t)) ** 2 for a, b in zip(t, y, strict=True))
    return slope, math.sqrt(rest / (n - 2) / spread)


def growing(samples: Sequence[Sample]) -> dict[str, str]:
    """Return the quantities that grow, and by how much."""
    steps = samples[-1]["step"]
    found = {}
    for what, limit in LIMITS.items():
        slope, error = fit(samples, what)
        allowed = max(limit, NOISE / steps) if what == "bytes" else limit
        if slope > 3 * error and slope > allowed:
            found[what] = f"{slope:.3g} ± {error:.2g} a step, allowed {allowed:.3g}"
    return found


def seen(folder: Path, labels: Sequence[str], steps: int, *options: str, ranks: int = 0) -> list[Mapping]:
    """Run the program `steps.py`, and return what each process has written."""
    program = [sys.executable, str(HERE / "soak" / "steps.py"), "--steps", str(steps), *options, *labels]
    launcher = [programs.mpiexec(), "-n", str(ranks)] if ranks else []
    path = f"{HERE}:{HERE.parent}:{unlaunched().get('PYTHONPATH', '')}"
    programs.run([*launcher, *program], cwd=folder, env=unlaunched(PYTHONPATH=path), timeout=ENOUGH)
    return [json.loads((folder / f"samples-{rank}.json").read_text()) for rank in range(ranks or 1)]


def told(label: str, samples: Sequence[Sample]) -> str:
    """Return the slope of each quantity with its standard error, as text."""
    slopes = {what: fit(samples, what) for what in LIMITS}
    return ", ".join(f"{what} {slope:+.3g} ± {error:.2g}" for what, (slope, error) in slopes.items())


@pytest.mark.soak
@pytest.mark.timeout(ENOUGH)
@pytest.mark.parametrize("label", first_of_each())
def test_ten_thousand_steps(label: str, tmp_path: Path) -> None:
    for rank, by_label in enumerate(seen(tmp_path, [label], STEPS, "--processes", ranks=RANKS)):
        samples = by_label[label]
        print(f"{label}, rank {rank}, {len(samples)} samples: {told(label, samples)}")
        assert growing(samples) == {}, f"{label}, rank {rank}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_some_steps_of_every_method(tmp_path: Path) -> None:
    """No method may leak. The methods run one after the other on threads of one process."""
    (by_label,) = seen(tmp_path, first_of_each(), SOME_STEPS)
    assert {ENTRIES[label].method for label in by_label} == METHODS.keys()
    assert {label: found for label, samples in by_label.items() if (found := growing(samples))} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_leaks_is_found(tmp_path: Path) -> None:
    (by_label,) = seen(tmp_path, ["bsp"], SOME_STEPS, "--leaks")
    assert growing(by_label["bsp"]).keys() >= {"tensors", "threads", "files"}


def test_slopes_are_distinguished_from_noise() -> None:
    chance = random.Random(1)

    def samples(slope: float) -> list[Sample]:
        usual = dict.fromkeys(LIMITS, 7)
        return [
            {"step": t, **usual, "bytes": round(10**8 + slope * t + chance.gauss(0, 50_000))}
            for t in range(2500, STEPS + 1, 156)
        ]

    assert all(growing(samples(slope)) == {} for slope in (0, 20, -200))
    assert growing(samples(300)).keys() == {"bytes"}
    slope, error = fit(samples(300), "bytes")
    assert abs(slope - 300) < 4 * error < 40
