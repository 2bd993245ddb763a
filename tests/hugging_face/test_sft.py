"""Tests of trl's SFTTrainer with the mixin: two groups train, and resume with the same bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import programs
from train.launches import unlaunched

PATIENCE = 300.0
"""Seconds; importing the libraries alone takes several."""
STEPS = 8
UNTRAINED = 2.3
"""The smallest loss of a model that has learned nothing about the 11 words."""


def trained(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return what each rank has found."""
    script = Path(__file__).parent / "sft.py"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = unlaunched(HF_HUB_OFFLINE="1", PYTHONPATH=f"{script.parents[1]}:{script.parents[2]}")
    command = [sys.executable, *ranks, str(script), str(folder), *words]
    programs.run(command, env=environment, timeout=PATIENCE)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.long
@pytest.mark.timeout(2 * PATIENCE + 20)
@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_sft_trains_and_resumes(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("trl")
    found = trained(tmp_path, kind)
    own = [each["own"] for each in found]
    assert own[0] == own[1] != own[2] == own[3]  # two groups of two, two steps after a synchronization
    assert {each["steps"] for each in found} == {STEPS}
    (loss,) = {each["loss"] for each in found}  # that of the averaged model
    assert kind == "lora" or loss < UNTRAINED
    assert trained(tmp_path, kind, str(STEPS // 2)) == found
