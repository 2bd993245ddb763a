"""The memory of a rank for a model that torch shards over its group, and a model too large for one rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import programs
from engine.fsdp_in_memory import BLOCK, TORCH, TRAINED, WHOLE
from pythons import python

SCRIPT = Path(__file__).with_name("fsdp_in_memory.py")
PATIENCE = 400.0  # seconds, because the machine may be busy
GATHERED = 4 * BLOCK
"""Bytes that torch needs for the blocks in use, late in a backward pass.

These are the weights of two blocks and the gradients of one. The gradients count twice: whole, and in the
order in which they are sent.
"""
EXACT = 0.05
FOR_SYNCS = 4 * 2 * BLOCK
"""Bytes of copies of the buckets that are being averaged.

A bucket ends with the layer that makes it long enough.
"""


def job(n: int, *words: str) -> programs.Done:
    command = [programs.mpiexec(), "-n", str(n), *python(str(SCRIPT), *words)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return programs.run(command, env=environment, timeout=PATIENCE, check=False)


def said(done: programs.Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
@pytest.mark.timeout(PATIENCE + 20)
@pytest.mark.parametrize("P", [1, 2])
def test_peaks(P: int) -> None:
    """Each of 4 ranks holds 1/K of parameters, gradients, moments and the method's state, and some blocks.

    This is no more than with torch's sharding alone. A synchronization adds copies of some buckets, and an
    evaluation adds a copy of w.
    """
    K, holds = 4 // P, {"diloco": 2} if P > 1 else {}
    names = [TORCH, "bsp", "hierarchical", *holds]
    done = job(4, "peaks", str(P), *names)
    assert done.returncode == 0, done.stderr
    found = {each["who"]: each["peaks"] for each in said(done)}
    assert list(found) == names
    for who, peaks in found.items():
        expected = (TRAINED + holds.get(who, 0) * WHOLE) / K
        assert (1 - EXACT) * expected < peaks["steps"] < (1 + EXACT) * expected + GATHERED, (who, found)
        outer_gradient = WHOLE / K if who == "diloco" else 0
        assert peaks["sync"] < peaks["steps"] + FOR_SYNCS / K + outer_gradient, (who, found)
        if who == TORCH:
            continue
        beside = peaks["steps"] - found[TORCH]["steps"] - holds.get(who, 0) * WHOLE / K
        assert beside < EXACT * expected, (who, found)
        assert peaks["made"] < (2 + holds.get(who, 0)) * WHOLE / K + GATHERED, (who, found)
        if P > 1:
            assert peaks["evaluation"] < (1 + EXACT) * expected + WHOLE / K + GATHERED, (who, found)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE + 20)
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("float64", 1e-12)])
def test_a_training_that_takes_three_times_what_a_rank_has(dtype: str, rounding: float) -> None:
    """A training on 2 × 4 ranks under RLIMIT_DATA gives the same model as one without a limit."""
    done = job(8, "limited", "2", dtype)
    assert done.returncode == 0, done.stderr
    (compared,) = said(done)
    assert compared["move"] > 1e-3
    assert compared["difference"] < rounding


@pytest.mark.long
@pytest.mark.timeout(PATIENCE + 20)
def test_whole_it_ends_for_want_of_memory() -> None:
    """Without sharding, the same limit ends the job at once with a message about memory."""
    done = job(8, "whole", "2")
    assert done.returncode == 1
    assert "trained within the limit" not in done.stdout
    assert "can't allocate memory" in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
