"""Tests of a run of a language model: its figures, its length in tokens, and partial evaluations."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.data import AsRank, Loader, Sampler, Windows, convert_text
from hpcsgd.errors import JobError, UserError
from hpcsgd.models import build
from hpcsgd.report.metrics import read
from hpcsgd.report.step_timer import Sample, StepTimer
from hpcsgd.report.summary import summary, summary_text
from hpcsgd.train.evaluation import evaluate
from hpcsgd.train.training_setup import assemble
from train.interruptions import assert_interruptions_change_nothing, train, without_pictures
from train.launches import JOB as IMAGES
from train.launches import launch, make_store
from train.workloads import fill

JOB = """
data = { path = "text.h5", group_batch_size = 6, arguments = { bptt = 7 } }
model = { name = "train.test_language_run:own" }
optimizer = { name = "SGD", lr = 0.1 }
lr_schedule = { scaling = "none", name = "CosineAnnealingLR", arguments = { T_max = "length" }, \
interval = "step" }
method = { name = "hierarchical", sync_every = 2 }
training = { tokens = 252, log_every = 2, peak_tflops = 0.001 }
"""
TOKENS = 7
OF_A_SAMPLE = 7 * (6 * (12 * 8**2 + 256 * 8) + 12 * 8 * 7)
"""FLOPs, counted by hand."""


def own() -> nn.Module:
    """Return a model whose values do not depend on torch's global generator."""
    model = build("gpt", {"types": 256, "width": 8, "layers": 1, "heads": 2})
    fill(model, 1)
    return model


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_pictures(monkeypatch)
    folder = tmp_path / str(os.getpid())  # under mpiexec every rank makes its own folder
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("\n\n".join(f"the {n}th of them, √{n}" for n in range(40)))
    (folder / "b.txt").write_text("\n\n".join(f"the {n}th" for n in range(30)))
    convert_text([folder / "a.txt"], folder / "text.h5", "bytes", test=[folder / "b.txt"], between="")
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


def kind(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == name]


def test_the_figures_of_a_run(job_file: Path, tmp_path: Path) -> None:
    """The steps, samples and tokens of a run are recorded.

    252 tokens are 36 windows. Two groups of one rank use 6 each per step. So there are 3 steps, the last one
    in a record of its own.
    """
    train(job_file, tmp_path, "--parallel.groups", "2", n=2)
    records = read(tmp_path / "metrics.jsonl")
    first, last = kind(records, "step")
    assert [(r["step"], r["samples"], r["tokens"]) for r in (first, last)] == [(2, 24, 168), (3, 12, 84)]
    assert "gradient_norm" in first
    assert "gradient_norm" not in last
    for record in (first, last):
        rate = record["samples_per_s"]
        assert record["tokens_per_s"] == pytest.approx(TOKENS * rate)
        assert record["flops"] == OF_A_SAMPLE * record["samples"]
        assert record["utilization"] == pytest.approx(OF_A_SAMPLE * rate / (2 * 0.001 * 1e12))
    assert last["lr"] == pytest.approx(0.1 * (1 + math.cos(math.pi * 2 / 3)) / 2)
    (tested,) = kind(records, "eval")
    held = Windows(job_file.parent / "text.h5", "test", bptt=TOKENS)
    assert held.bytes is not None
    assert held.tokens == held.bytes + 30
    expected = tested["loss"] * held.tokens / held.bytes / math.log(2)
    assert tested["bits_per_byte"] == pytest.approx(expected)
    numbers = summary(records)
    assert (numbers["tokens"], numbers["flops"]) == (252, 36 * OF_A_SAMPLE)
    seconds = numbers["seconds"]
    assert numbers["tokens_per_s"] == pytest.approx(252 / seconds)
    assert numbers["utilization"] == pytest.approx(36 * OF_A_SAMPLE / seconds / 2e9)
    assert numbers["gradient_norm"] == first["gradient_norm"]
    lines = summary_text(numbers).splitlines()
    a_token = f"{OF_A_SAMPLE / TOKENS / 1000:.3g} kFLOP a token"
    speed = f"speed     {252 / seconds:,.0f} tokens/s, {numbers['utilization']:.1%} of the peak, {a_token}"
    assert speed in lines


def test_the_norm_of_the_gradient(job_file: Path, tmp_path: Path) -> None:
    """Of one rank and with a constant rate, it is the norm of the batch's gradient."""
    schedule = 'name = "CosineAnnealingLR", arguments = { T_max = "length" }, interval = "step"'
    job_file.write_text(JOB.replace(schedule, 'name = "ConstantLR", arguments = { factor = 1.0 }'))
    train(job_file, tmp_path, "--training.log_every", "1")
    found = [record["gradient_norm"] for record in kind(read(tmp_path / "metrics.jsonl"), "step")]
    data, model = Windows(job_file.parent / "text.h5", "train", bptt=TOKENS), own()
    batches = list(islice(Loader(data, 6, Sampler(data, AsRank(0, 1), seed=1)), 6))
    for (x, y), norm in zip(batches, found, strict=True):
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert norm == pytest.approx(torch.cat([g.flatten() for g in grads]).norm().item(), rel=1e-4)
        for p, g in zip(model.parameters(), grads, strict=True):
            p.data.sub_(g, alpha=0.1)


@pytest.mark.slow
def test_interruptions_change_nothing(job_file: Path, tmp_path: Path) -> None:
    words = ("--parallel.groups", "2", "--training.tokens", "600", "--training.log_every", "1")
    assert_interruptions_change_nothing(job_file, tmp_path, *words, "--training.checkpoint_every_steps", "3")


@pytest.mark.parametrize(
    ("words", "n", "steps"),
    [
        (("--training.tokens", "7"), 1, 1),
        (("--training.tokens", "42"), 1, 1),
        (("--training.tokens", "43"), 1, 2),
        (("--training.tokens", "84"), 2, 1),
    ],
)
def test_so_many_tokens(job_file: Path, words: tuple[str, ...], n: int, steps: int) -> None:
    def one(world: Communicator) -> int:
        return assemble(load(job_file, words), form(world, n), "job.toml").length.expected

    assert threads.run(n, one) == [steps] * n


@pytest.mark.parametrize(("n", "P"), [(1, 1), (3, 1), (4, 2)])
def test_an_evaluation_of_a_part(run: Callable[..., list[Any]], job_file: Path, n: int, P: int) -> None:
    """It uses windows from all of the test data, the same ones for any P × K."""

    def one(world: Communicator) -> float:
        words = ["--training.eval_tokens", "64", "--data.group_batch_size", "12"]
        parts = assemble(load(job_file, words), form(world, P), "job.toml")
        return evaluate(parts).loss

    test = Windows(job_file.parent / "text.h5", "test", bptt=TOKENS)
    rows = [i * len(test) // 10 for i in range(10)]
    x, y = test.collate(test.__getitems__(rows))
    with torch.no_grad():
        expected = cross_entropy(own()(x).flatten(0, 1), y.flatten()).item()
    assert run(n, one) == [pytest.approx(expected, rel=1e-5)] * n


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["bf16", "bf16_master"])
def test_it_learns_in_16_bits(job_file: Path, tmp_path: Path, bits: str) -> None:
    words = ("--training.tokens", "8000", "--training.precision", bits, "--optimizer.lr", "0.5")
    train(job_file, tmp_path, "--parallel.groups", "2", *words, n=2)
    records = read(tmp_path / "metrics.jsonl")
    losses = [record["loss"] for record in kind(records, "step")]
    assert losses[-1] < losses[0] - 1.0
    assert kind(records, "eval")[-1]["bits_per_byte"] < 7.0


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_meter(run: Callable[..., list[Any]], n: int) -> None:
    """The gradient norm is the root of the sum of all ranks' squares over the number of groups."""

    def measured(world: Communicator) -> None:
        topology = form(world, groups=max(n // 2, 1))
        sample = Sample(tokens=5, flops=1e6, peak=0.5)
        meter = StepTimer(topology, world.dup_with_thread(), sample=sample, by_torch=7.0)
        meter.passes(3)
        meter.step(torch.tensor(1.0), 3, 0.0, {})
        meter.gradient(torch.tensor(1.0 + world.rank))
        found, nothing = meter.read().wait(), meter.read().wait()
        assert found.gradient_norm == pytest.approx((sum(range(1, n + 1)) / topology.num_groups) ** 0.5)
        assert found.tokens == 15 * n
        assert found.tokens_per_s == pytest.approx(5 * found.samples_per_s)
        assert found.utilization == pytest.approx(found.samples_per_s * 1e6 / (n * 0.5e12))
        assert nothing.gradient_norm is None
        assert (found.bytes_by_torch, nothing.bytes_by_torch) == (21.0, 0.0)

    run(n, measured)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--training.tokens 3 --training.samples 4",
            "samples = 4 and tokens = 3: give one of them, not both",
        ),
        ("--training.tokens 0", "--training.tokens 0: expected int ≥ 1"),
        ("--training.eval_tokens 0", "--training.eval_tokens 0: expected int ≥ 1"),
        ("--training.peak_tflops 0", "--training.peak_tflops 0: expected number > 0"),
        ("--training.activation_checkpointing 1", "expected true or false"),
    ],
)
def test_keys_that_do_not_fit(job_file: Path, words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(job_file, words.split())


def test_no_length(job_file: Path) -> None:
    job_file.write_text(JOB.replace("tokens = 252, ", ""))
    with pytest.raises(UserError, match=r"\[training\]: no length: give epochs, or steps, samples or tokens"):
        load(job_file)


@pytest.mark.parametrize("key", ["tokens", "eval_tokens"])
def test_of_what_is_not_made_of_tokens(tmp_path: Path, key: str) -> None:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(IMAGES)

    def one(world: Communicator) -> None:
        assemble(load(tmp_path / "job.toml", [f"--training.{key}", "64"]), form(world, 1), "job.toml")

    with pytest.raises(
        JobError, match=rf"job.toml: \[training\] {key}: the samples of this dataset file are not"
    ):
        threads.run(1, one)


@pytest.mark.slow
def test_as_it_is_started(job_file: Path) -> None:
    """The lines have tokens, the share of the peak, and the peak that was used."""
    model = "{ types = 256, width = 8, layers = 1, heads = 2 }"
    words = ("--model.name", "gpt", "--model.arguments", model, "--parallel.groups", "2")
    done = launch(job_file.parent, "train", job_file.name, *words, n=2)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if "step 2/3" in line]
    assert "tokens/s, " in line
    assert "% of the peak  eta" in line
    assert "bits/byte" in done.out
