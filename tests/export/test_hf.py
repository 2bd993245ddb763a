"""A model of the library `transformers` goes out so that the library loads it, and comes in again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.test_tokenizers import write_tokenizer
from export.models_of_tests import of_transformers
from export.test_export import assert_same, left, trained, write_text
from hpcsgd.data.corpus import tokenizer_of_store
from hpcsgd.export import export
from hpcsgd.models.weights import load_into, read
from training.interruptions import without_pictures

pytest.importorskip("transformers")
MODEL = ("--model.build", "export.models_of_tests:of_transformers", "--model.arguments")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_pictures(monkeypatch)
    job_file = write_text(tmp_path, str(write_tokenizer(tmp_path)))
    types = tokenizer_of_store(tmp_path / "text.h5").types
    return trained(job_file, tmp_path / "run", *MODEL, f"{{types={types}}}", "--job.groups", "2", n=2)


@pytest.mark.filterwarnings("default")  # of the library's own
def test_out_and_in_again(run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(run, "hf")
    folder, expected = run / "model-hf", left(run)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    inside = {name.removeprefix("inner."): x for name, x in expected.items()}
    assert_same(dict(loaded.state_dict()), inside)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert "lm_head.weight" not in read(folder), "there once"

    assert {path.stat().st_mode for path in folder.iterdir()} == {(run / "model.pt").stat().st_mode}

    own, text = tokenizer_of_store(run.parent / "text.h5"), "the 3rd of them, √3"
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(text, add_special_tokens=False)["input_ids"] == own.encode([text.encode()])[0].tolist()
    assert theirs.eos_token_id == loaded.generation_config.eos_token_id == own.end
    assert loaded.config.use_cache

    again = of_transformers(own.types)
    load_into(again, folder)
    assert_same(dict(again.state_dict()), expected)
    load_into(again, run / "model.pt")
    assert_same(dict(again.state_dict()), expected)


@pytest.mark.filterwarnings("default")
def test_of_a_checkpoint_in_16_bits(run: Path) -> None:
    """Parameters in bfloat16 stay so; without its store the model goes without a tokenizer."""
    from transformers import AutoModelForCausalLM

    state = {name: x.bfloat16() for name, x in left(run).items()}
    torch.save(state, run / "model.pt")
    (run.parent / "text.h5").unlink()
    export(run, "hf")
    assert not (run / "model-hf" / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(run / "model-hf", dtype="auto")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, state["inner.lm_head.weight"])
