"""Tests of `[training] activation_checkpointing`: the same bits with less memory, also with other options."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.originals import write_wikitext
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import TrainingSection, load
from hpcsgd.core.topology import form
from hpcsgd.data import convert
from hpcsgd.engine.precision import precision
from hpcsgd.errors import UserError
from hpcsgd.models import build
from hpcsgd.train.model_layout import lay_out
from hpcsgd.train.recomputing import recompute
from hpcsgd.train.training_setup import assemble
from train.interruptions import assert_interruptions_change_nothing, outcome, train, without_pictures
from train.launches import launch
from train.workloads import WORDS, fill

ON = ("--training.activation_checkpointing", "true")
TEXT = torch.randint(14, (4, 8), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
GPT2 = {"vocab_size": 14, "n_positions": 8, "n_embd": 8, "n_layer": 4, "n_head": 2}
CASES: dict[str, tuple[str, dict[str, Any], Tensor]] = {
    "gpt": ("gpt", {"types": 14, "width": 16, "layers": 4, "heads": 2, "dropout": 0.3}, TEXT),
    "gpt2": ("transformers:AutoModelForCausalLM", {"model_type": "gpt2", **GPT2}, TEXT),
    "resnet": ("resnet20", {}, IMAGES),
    "resnet18": ("resnet18", {}, IMAGES),
}


def two_of(name: str, bits: str = "fp32") -> tuple[nn.Module, nn.Module]:
    """Return the plain model and one with activation checkpointing."""
    build_name, arguments, _ = CASES[name]
    plain = build(build_name, arguments)
    again = copy.deepcopy(plain)
    section = TrainingSection(epochs=1, activation_checkpointing=True)
    lay_out(again, section, precision(bits, torch.device("cpu")))
    return plain, again


@contextmanager
def kept() -> Iterator[list[int]]:
    """Yield a list that gets the bytes that a forward pass keeps, each storage counted once."""
    sizes: dict[int, int] = {}
    held: list[Any] = []

    def pack(x: Tensor) -> Tensor:
        held.append(x)
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total
    total.append(sum(sizes.values()))


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str, bits: str) -> None:
    """Two passes have equal gradients and running statistics, and leave torch's generator in equal states."""
    found = []
    for model in two_of(name, bits):
        torch.manual_seed(3)
        for _ in range(2):
            with precision(bits, torch.device("cpu")).computing():
                loss = model(CASES[name][2]).square().mean()
            loss.backward()
        found.append((loss, dict(model.named_parameters()), model.state_dict(), torch.get_rng_state()))
    (loss, params, state, chance), (loss_, params_, state_, chance_) = found
    assert torch.equal(loss, loss_)
    assert params.keys() == params_.keys()
    for key, p in params.items():
        assert p.grad is not None
        assert torch.equal(p.grad, params_[key].grad), key
    assert all(torch.equal(value, state_[key]) for key, value in state.items())
    assert torch.equal(chance, chance_)


@pytest.mark.parametrize("name", CASES)
def test_less_is_kept(name: str) -> None:
    """Blocks keep nothing. `checkpoint` keeps their inputs, which these hooks do not see."""
    bytes_kept = []
    for model in two_of(name):
        with kept() as total:
            loss = model(CASES[name][2]).square().mean()
        bytes_kept += total
        loss.backward()
    assert bytes_kept[1] < bytes_kept[0] / 2


def test_what_goes_by_a_buffer_that_it_changes() -> None:
    """Every forward pass changes spectral norm's vectors, and the weight is divided by a value from them."""
    torch.manual_seed(0)
    layers = (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(2))
    plain = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
    again = copy.deepcopy(plain)
    recompute(again)
    x, found = torch.randn(5, 6), []
    for model in (plain, again):
        for _ in range(3):
            model(x).square().sum().backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_copy_is_on_its_own() -> None:
    """The probe makes such copies."""
    _, model = two_of("gpt")
    other = copy.deepcopy(model)
    other(TEXT).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


def own(types: int = 14) -> nn.Module:
    """Return a model whose values do not depend on torch's global generator."""
    model = build("gpt", {"types": types, "width": 8, "layers": 2, "heads": 2})
    fill(model, 1)
    return model


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_pictures(monkeypatch)
    convert("wikitext", write_wikitext(tmp_path / "words"), tmp_path / "store.h5")
    (tmp_path / "job.toml").write_text(WORDS)
    return tmp_path / "job.toml"


OWN = ("--model.name", "train.test_recomputing:own", "--model.arguments", "{}", "--parallel.groups", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--training.bucket_cap_mb", "0.001"),
        pytest.param(
            ("--training.overlap_param_gather", "true", "--training.bucket_cap_mb", "0.001"),
            marks=pytest.mark.long,
        ),
        ("--training.overlap_grad_reduce", "false", "--training.precision", "bf16"),
    ],
)
def test_whole_runs_end_the_same(job_file: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Gradients are sent during the backward pass, and weights arrive during the forward pass."""
    found = []
    for folder, more in (("plain", ()), ("again", ON)):
        train(job_file, tmp_path / folder, *OWN, *words, *more, n=4)
        found.append(outcome(tmp_path / folder))
    (model, records), (model_, records_) = found
    assert records == records_
    assert all(torch.equal(value, model_[key]) for key, value in model.items())


@pytest.mark.slow
def test_interruptions_change_nothing(job_file: Path, tmp_path: Path) -> None:
    assert_interruptions_change_nothing(
        job_file, tmp_path, *OWN, *ON, "--training.checkpoint_every_steps", "3"
    )


@pytest.mark.long
def test_as_it_is_started(job_file: Path, tmp_path: Path) -> None:
    """A model with dropout, in bf16, trains the same bits; each process has its own generator."""
    text = "{ types = 14, width = 8, layers = 2, heads = 2, dropout = 0.2 }"
    models = []
    for run, more in (("plain", ()), ("again", ON)):
        words = ("--model.name", "gpt", "--model.arguments", text, "--training.precision", "bf16")
        done = launch(tmp_path, "train", job_file.name, *words, *more, "--run.output_dir", run, n=2)
        assert done.code == 0, done.err
        models.append(torch.load(tmp_path / run / "model.pt"))
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--training.compile", "true"), "activation_checkpointing and compile: .* give one of them"),
        (("--model.name", "lstm"), r"\[training\] activation_checkpointing: the model has no blocks"),
        (
            ("--optimizer.natural_gradient.rank", "2"),
            r"\[optimizer\] natural_gradient: activation_checkpointing: the natural gradient would see",
        ),
    ],
)
def test_what_does_not_go_together(job_file: Path, words: tuple[str, ...], message: str) -> None:
    def one(world: Communicator) -> None:
        types = ("--model.arguments", "{ types = 14 }")
        assemble(load(job_file, ["--model.name", "gpt", *types, *ON, *words]), form(world, 1), "job.toml")

    with pytest.raises(UserError, match=message):
        threads.run(1, one)
