"""Tests of a model of the library `transformers` in whole runs: tied weights, four ranks, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from data.originals import write_wikitext
from hpcsgd.data import convert
from hpcsgd.models import build
from train.interruptions import assert_interruptions_change_nothing, outcome, without_pictures
from train.launches import launch
from train.workloads import WORDS, fill

SIZES = {"vocab_size": 14, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
CALM = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def calm() -> nn.Module:
    """Return a model without random numbers, because threads share torch's generator."""
    model: Any = build("transformers:GPT2LMHeadModel", {**SIZES, **CALM})
    fill(model, 1)
    return model


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_pictures(monkeypatch)
    convert("wikitext", write_wikitext(tmp_path / "words"), tmp_path / "store.h5")
    sizes = ", ".join(f"{name} = {value}" for name, value in SIZES.items())
    model = f'name = "transformers:AutoModelForCausalLM", arguments = {{ model_type = "gpt2", {sizes} }}'
    kept = [line for line in WORDS.splitlines() if not line.startswith("model")]
    (tmp_path / "job.toml").write_text("\n".join([*kept, f"model = {{ {model} }}", ""]))
    return tmp_path / "job.toml"


@pytest.mark.slow
def test_interruptions_change_nothing(job_file: Path, tmp_path: Path) -> None:
    own = ("--model.name", "train.test_of_transformers:calm", "--model.arguments", "{}")
    words = ("--parallel.groups", "2", "--training.checkpoint_every_steps", "3")
    assert_interruptions_change_nothing(job_file, tmp_path, *own, *words)


@pytest.mark.long
def test_as_it_is_started(job_file: Path, tmp_path: Path) -> None:
    """It learns on two ranks and resumes on one; the result is the library's own model."""
    words = ("--training.epochs", "3", "--run.output_dir", "run")
    done = launch(tmp_path, "train", job_file.name, *words, "--training.epochs", "2", n=2)
    assert done.code == 0, done.err
    done = launch(tmp_path, "train", job_file.name, *words, "--resume")
    assert done.code == 0, done.err
    model, records = outcome(tmp_path / "run")
    tested = [r["perplexity"] for r in records if r["kind"] == "eval"]
    assert len(tested) == 3
    assert tested[-1] < tested[0] < math.inf
    theirs: Any = build("transformers:AutoModelForCausalLM", {"model_type": "gpt2", **SIZES})
    theirs.load_state_dict(model)
    assert torch.equal(theirs.lm_head.weight, model["transformer.wte.weight"])


@pytest.mark.slow
def test_too_long_windows_are_one_line(job_file: Path, tmp_path: Path) -> None:
    done = launch(tmp_path, "train", job_file.name, "--data.arguments.bptt", "9")
    assert done.code == 1
    assert done.err.count("\n") == 1, done.err
    line = "hpcsgd: job.toml: [model]: transformers:AutoModelForCausalLM does not take samples of shape [9] "
    assert done.err.startswith(line)
