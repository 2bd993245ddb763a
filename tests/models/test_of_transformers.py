"""Models of the library `transformers`, configured small enough for a test. Nothing is downloaded."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import programs
from hpcsgd.errors import UserError
from hpcsgd.models import build
from hpcsgd.train.model_layout import regions
from pythons import python

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 14, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2},
    "llama": {
        "vocab_size": 14, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 8,
    },
}  # fmt: skip
ANY = "transformers:AutoModelForCausalLM"


def small(model_type: str, **more: Any) -> Any:
    return build(ANY, {"model_type": model_type, **SMALL[model_type], **more})


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SMALL)
def test_scores_are_the_librarys_own(model_type: str) -> None:
    """The library's own model loads the same weights by their names and computes the same scores."""
    import transformers

    model = small(model_type).eval()
    theirs = type(model)(copy.deepcopy(model.config)).eval()
    theirs.load_state_dict(model.state_dict())
    assert isinstance(theirs, transformers.PreTrainedModel)
    x = torch.randint(14, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(x)
        assert torch.equal(found, theirs(x).logits)
        assert torch.equal(found, copy.deepcopy(model)(x))
    assert found.shape == (3, 7, 14)
    assert model.config.use_cache is False


def test_a_models_own_class_and_tied_weights() -> None:
    model: Any = build("transformers:GPT2LMHeadModel", SMALL["gpt2"])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert small("gpt2", tie_word_embeddings=False).lm_head.weight.shape == (14, 8)
    assert type(model) is type(small("gpt2"))


@pytest.mark.parametrize(("model_type", "kind"), [("gpt2", "GPT2Block"), ("llama", "LlamaDecoderLayer")])
def test_its_regions_are_its_layers(model_type: str, kind: str) -> None:
    assert [type(region).__name__ for region in regions(small(model_type))] == [kind] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (ANY, {"model_type": "gtp2"}, r"\[model.arguments\]: no model_type 'gtp2' in transformers; .* gpt2"),
        (ANY, {}, "model_type is missing; allowed is what the library knows, such as"),
        (ANY, {"model_type": "gpt2", "n_layers": 2}, "no argument 'n_layers'; did you mean 'n_layer'"),
        (ANY, {"model_type": "gpt2", "n_layer": "2"}, "GPT2Config: n_layer = '2': expected int"),
        (ANY, {"model_type": "gpt2", "n_inner": 0.5}, "GPT2Config: n_inner = 0.5: expected int"),
        (ANY, {"model_type": "gpt2", "n_embd": 7, "n_head": 2}, "must be divisible"),
        (ANY, {"model_type": "vit"}, "Unrecognized configuration class .*ViTConfig"),
        (
            "transformers:AutoModelForCausallM",
            {},
            r"\[model\] name: no model 'AutoModelForCausallM' in transformers; "
            "did you mean 'AutoModelForCausalLM'",
        ),
        ("transformers:pipeline", {}, "no model 'pipeline' in transformers"),
    ],
)
def test_what_it_does_not_have(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        build(name, arguments)
    assert "\n" not in str(found.value)


def test_without_a_head() -> None:
    model = build("transformers:AutoModel", {"model_type": "gpt2", **SMALL["gpt2"]})
    with pytest.raises(UserError, match="GPT2Model gives no scores: take a class with a head"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r'needs the library `transformers`: pip install "hpcsgd\[hf\]"'):
        small("gpt2")


FOUR_AT_ONCE = f"""
from concurrent.futures import ThreadPoolExecutor
from hpcsgd.models import build
with ThreadPoolExecutor(4) as pool:
    models = list(pool.map(lambda _: build("transformers:GPT2LMHeadModel", {SMALL["gpt2"]}), range(4)))
print(*(type(model).__name__ for model in models))
"""


@pytest.mark.slow
def test_ranks_that_are_threads_find_the_whole_library(tmp_path: Path) -> None:
    """The library has not yet been imported in the process in which four threads build models."""
    (tmp_path / "build.py").write_text(FOUR_AT_ONCE)
    done = programs.run(python(str(tmp_path / "build.py")), check=False)
    assert done.stdout.split() == ["GPT2LMHeadModel"] * 4, done.stderr
