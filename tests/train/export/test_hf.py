"""Tests that an exported model of the library `transformers` can be loaded by the library and by hpcsgd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data.test_tokenizers import write_tokenizer
from hpcsgd import models
from hpcsgd.config.schema import load
from hpcsgd.data.corpus import tokenizer_of_file
from hpcsgd.models.weights import load_into, read
from hpcsgd.train.export import export
from train.export.models_of_tests import of_transformers
from train.export.test_export import assert_same, left, trained, write_text
from train.interruptions import without_pictures

pytest.importorskip("transformers")
BUILD = "transformers:AutoModelForCausalLM"
LIBRARYS = {
    "gpt2": "n_embd=8,n_layer=1,n_head=2,n_positions=16",
    "llama": "hidden_size=8,intermediate_size=16,num_hidden_layers=1,num_attention_heads=2,"
    "num_key_value_heads=2,max_position_embeddings=16",
}


def run_with(tmp_path: Path, model: tuple[str, ...], arguments: str) -> Path:
    """Train two groups on a text of tokens and return the run; TYPES in `arguments` is replaced."""
    job_file = write_text(tmp_path, str(write_tokenizer(tmp_path)))
    types = tokenizer_of_file(tmp_path / "text.h5").types
    words = [*model, "--model.arguments", arguments.replace("TYPES", str(types)), "--parallel.groups", "2"]
    return trained(job_file, tmp_path / "run", *words, n=2)


@pytest.fixture
def of_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run whose model contains one of the library's."""
    without_pictures(monkeypatch)
    return run_with(
        tmp_path, ("--model.name", "train.export.models_of_tests:of_transformers"), "{types=TYPES}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIBRARYS)
@pytest.mark.filterwarnings("default")
def test_the_librarys_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The library loads the export of a run and generates text, and hpcsgd loads it again.

    The export of the last checkpoint is the same.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    without_pictures(monkeypatch)
    run = run_with(
        tmp_path, ("--model.name", BUILD), f'{{vocab_size=TYPES,model_type="{kind}",{LIBRARYS[kind]}}}'
    )
    expected = left(run)
    export(run, "hf")
    loaded: Any = AutoModelForCausalLM.from_pretrained(run / "model-hf")
    assert_same(dict(loaded.state_dict()), expected)
    tokenizer = AutoTokenizer.from_pretrained(run / "model-hf")
    asked = tokenizer("the 3rd", return_tensors="pt", add_special_tokens=False)
    told = loaded.generate(**asked, max_new_tokens=5, do_sample=False)
    assert asked["input_ids"].shape[1] < told.shape[1] <= asked["input_ids"].shape[1] + 5
    again = models.build(BUILD, load(run / "job.toml").model.arguments)
    load_into(again, run / "model-hf")
    assert_same(dict(again.state_dict()), expected)
    (run / "model.pt").unlink()
    export(run, "hf", run / "of a checkpoint")
    assert_same(read(run / "of a checkpoint"), read(run / "model-hf"))


@pytest.mark.filterwarnings("default")  # the library's own warnings
def test_out_and_in_again(of_own: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(of_own, "hf")
    folder, expected = of_own / "model-hf", left(of_own)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    inside = {name.removeprefix("inner."): x for name, x in expected.items()}
    assert_same(dict(loaded.state_dict()), inside)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert "lm_head.weight" not in read(folder), "there once"

    assert {path.stat().st_mode for path in folder.iterdir()} == {(of_own / "model.pt").stat().st_mode}

    own, text = tokenizer_of_file(of_own.parent / "text.h5"), "the 3rd of them, √3"
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(text, add_special_tokens=False)["input_ids"] == own.encode([text.encode()])[0].tolist()
    assert theirs.eos_token_id == loaded.generation_config.eos_token_id == own.end
    assert loaded.config.use_cache

    again = of_transformers(own.types)
    load_into(again, folder)
    assert_same(dict(again.state_dict()), expected)
    load_into(again, of_own / "model.pt")
    assert_same(dict(again.state_dict()), expected)


@pytest.mark.filterwarnings("default")
def test_in_16_bits(of_own: Path) -> None:
    """Parameters in bfloat16 keep their dtype. Without its dataset file a model has no tokenizer."""
    from transformers import AutoModelForCausalLM

    state = {name: x.bfloat16() for name, x in left(of_own).items()}
    torch.save(state, of_own / "model.pt")
    (of_own.parent / "text.h5").unlink()
    export(of_own, "hf")
    assert not (of_own / "model-hf" / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(of_own / "model-hf", dtype="auto")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, state["inner.lm_head.weight"])
