"""Tests of `[training] precision`, `channels_last`, `compile` and `deterministic`, in runs on threads."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpcsgd
from hpcsgd.comm import Communicator, streams, threads
from hpcsgd.config.schema import load
from hpcsgd.core.replica_groups import Absent
from hpcsgd.core.topology import form
from hpcsgd.data import ImageDataset
from hpcsgd.errors import UserError
from hpcsgd.performance.probing.job_file import plan_of, probe_config
from hpcsgd.train import process
from hpcsgd.train.probe_answer import setting
from hpcsgd.train.training_setup import assemble
from train.interruptions import assert_interruptions_change_nothing, outcome, train, without_pictures
from train.launches import JOB, launch, make_store

BITS = ["bf16", "fp16", "bf16_master"]
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ON_4 = ("--parallel.groups", "2", "--data.group_batch_size", "8", "--model.name", "train.small:steady")
SPARSE = '{name="sparse",sparsifier={name="topk",density=0.5}}'
ARGUMENTS = ("--model.arguments", "{inputs = 36}")


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5")
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


def scaled_from(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every scaler start at this scale, and grow after two steps."""
    made = functools.partial(hpcsgd.GradScaler, init_scale=scale, growth_interval=2)
    monkeypatch.setattr("hpcsgd.engine.precision.GradScaler", made)


def start_of(job_file: Path) -> tuple[nn.Module, Any]:
    parts: Any = []
    threads.run(1, lambda world: parts.append(assemble(load(job_file), form(world), "job.toml")))
    return copy.deepcopy(parts[0].model), parts[0].sampler


@pytest.mark.parametrize("name", NARROW)
def test_one_rank_is_the_plain_loop(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The loop uses torch's own autocast and scaler, also in evaluations. The first scales overflow."""
    scaled_from(2.0**28, monkeypatch)
    words = (
        "--lr_schedule.name=StepLR",
        "--lr_schedule.arguments",
        "{step_size = 3}",
        "--lr_schedule.interval=step",
    )
    train(job_file, tmp_path, "--training.precision", name, "--training.epochs", "8", *words)
    net, sampler = start_of(job_file)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28, growth_interval=2, enabled=name == "fp16")
    store, losses = ImageDataset(job_file.parent / "small.h5", "train"), []
    skipped = 0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(16):
            x, y = ImageDataset.collate(store.__getitems__(rows.tolist()))
            with torch.autocast("cpu", NARROW[name]):
                loss = cross_entropy(net(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() < before:
                skipped += 1
            else:
                losses.append(loss.item())
                schedule.step()
    model, records = outcome(tmp_path)
    assert all(torch.equal(value, model[key]) for key, value in net.state_dict().items())
    assert (skipped > 5) == (name == "fp16")
    steps = [record for record in records if record["kind"] == "step"]
    assert steps[-1]["step"] == len(losses)
    if not skipped:
        assert [record["loss"] for record in steps] == losses
    tested = ImageDataset(job_file.parent / "small.h5", "test")
    x, y = ImageDataset.collate(tested.__getitems__(list(range(len(tested)))))
    with torch.no_grad(), torch.autocast("cpu", NARROW[name]):
        expected = cross_entropy(net.eval()(x), y, reduction="sum").item() / len(y)
    assert [record["loss"] for record in records if record["kind"] == "eval"][-1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", BITS)
def test_interruptions_change_nothing(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The scale, and the master weights of groups that have just synchronized, are resumed."""
    scaled_from(2.0**24, monkeypatch)
    options = (
        "--training.epochs",
        "4",
        "--training.precision",
        name,
        "--training.checkpoint_every_steps",
        "3",
    )
    assert_interruptions_change_nothing(job_file, tmp_path, *ON_4, *ARGUMENTS, *options)


def test_masters_are_of_a_model_in_bfloat16(job_file: Path, tmp_path: Path) -> None:
    """The model is saved in bfloat16, except layers with running statistics. Half as many bytes are sent."""
    sent = {}
    for name in ("fp32", "bf16_master"):
        (tmp_path / name).mkdir()
        words = ("--training.precision", name, "--parallel.groups", "1", "--data.group_batch_size", "8")
        train(job_file, tmp_path / name, *words, *ON_4[4:], *ARGUMENTS, n=2)
        model, records = outcome(tmp_path / name)
        dtypes = {key: value.dtype for key, value in model.items() if value.is_floating_point()}
        narrow = {key for key, dtype in dtypes.items() if dtype == torch.bfloat16}
        assert narrow == (set() if name == "fp32" else {"1.weight", "1.bias", "4.weight", "4.bias"})
        sent[name] = sum(r["phase_bytes"]["grad_reduce"] for r in records if r["kind"] == "step")
    wide, linear = 16, 36 * 8 + 8 + 8 * 10 + 10  # the parameters of batch norm, and the others
    assert sent["bf16_master"] / sent["fp32"] == pytest.approx(
        (4 * wide + 2 * linear) / (4 * (wide + linear))
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [
                "--training.precision=fp16",
                "--method.grad_reduce",
                SPARSE,
            ],
            r"\[training\] precision: GradScaler: the gradient reduction keeps gradients",
        ),
        (["--training.channels_last", "true"], r"\[training\] channels_last: the model has no convolution"),
        (["--training.precision", "fp8"], "Allowed: bf16, bf16_master, fp16, fp32"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_trains(
    job_file: Path, words: list[str], message: str
) -> None:
    def one(world: Communicator) -> None:
        assemble(load(job_file, ["--data.group_batch_size", "8", *words]), form(world, 1), "job.toml")

    with pytest.raises(UserError, match=message):
        threads.run(2, one)


def test_groups_that_may_die_would_skip_other_steps(job_file: Path) -> None:
    def one(world: Communicator) -> None:
        config = load(job_file, ["--training.precision", "fp16", "--method.name", "ensemble_sync"])
        assemble(config, dataclasses.replace(form(world), replica_groups=Absent(count=2)), "job.toml")

    with pytest.raises(UserError, match=r"\[training\] precision: GradScaler: groups that may die"):
        threads.run(1, one)


@pytest.mark.slow
def test_a_probe_trains_in_the_same_precision(
    job_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With master weights the probe reports that it does not use them."""
    seen: set[tuple[torch.dtype, bool]] = set()
    called = nn.Linear.forward

    def watched(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        found = called(self, x)
        seen.add((found.dtype, torch.is_grad_enabled()))
        return found

    monkeypatch.setattr(nn.Linear, "forward", watched)
    for name in BITS:
        config = load(job_file, ["--training.precision", name, "--data.group_batch_size", "2"])
        plan = plan_of(config, job_file, [2, 4], 1)
        seen.clear()
        with caplog.at_level(logging.WARNING):
            found: Any = threads.run(1, lambda world, c=config, p=plan: probe_config(c, p, world))
        dtype = torch.float16 if name == "fp16" else torch.bfloat16
        # First the model runs once in its initial dtype; then it trains, and it runs on held-out data.
        assert seen == {(torch.float32, False), (dtype, True), (dtype, False)}
        assert found[0].rows
        assert setting(config)["training"] == {"precision": name}
    assert "[training] precision: the probe's groups train with bf16" in caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_is_saved_by_its_own_names(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = nn.Module.compile
    backend: Callable[..., None] = functools.partialmethod(compiled, backend="aot_eager")  # type: ignore[assignment]
    monkeypatch.setattr(nn.Module, "compile", backend)
    models = []
    for words in ([], ["--training.compile", "true"]):
        folder = tmp_path / str(len(words))
        train(job_file, folder, *words)
        models.append(outcome(folder)[0])
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-5)


def test_deterministic_operations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: told.append(f"algorithms {on}"))
    monkeypatch.setattr(streams, "choose_no_kernels_by_time", lambda: told.append("cuDNN"))
    process.compute_alike(False)
    assert told == []
    process.compute_alike(True)
    assert told == ["algorithms True", "cuDNN"]
    assert process.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_cudnn_does_not_try_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    streams.choose_no_kernels_by_time()
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, True)


@pytest.mark.slow
def test_two_deterministic_runs_are_equal(tmp_path: Path) -> None:
    """The runs are started as users do it; no randomness is left, and torch's deterministic mode is on."""
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB + "deterministic = true\n")
    (tmp_path / "net.py").write_text(
        "import torch\nfrom hpcsgd.models import mlp\n\n\n"
        "def asked(x, generator):\n    assert torch.are_deterministic_algorithms_enabled()\n    return x\n"
    )
    models = []
    for run in ("one", "other"):
        words = ("--data.transform", "net:asked", "--run.output_dir", run, "--training.precision", "bf16")
        ended = launch(tmp_path, "train", "job.toml", *words, n=2)
        assert ended.code == 0, ended.err
        models.append(torch.load(tmp_path / run / "model.pt"))
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
