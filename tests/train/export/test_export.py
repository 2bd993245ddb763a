"""Tests that every export format has exactly the averaged model, and that it can be loaded again."""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hpcsgd import models
from hpcsgd.cli import main
from hpcsgd.config.schema import load
from hpcsgd.data import convert_text
from hpcsgd.errors import UserError
from hpcsgd.models.weights import load_into, read
from hpcsgd.report.run_folder import write_config
from hpcsgd.train.export import FORMATS, export
from train.interruptions import train, without_pictures
from train.launches import JOB, make_store

GPT = """
data = { path = "text.h5", group_batch_size = 8, arguments = { bptt = 6 } }
model = { name = "gpt", arguments = { types = 256, width = 8, layers = 1, heads = 2 } }
optimizer = { name = "Adam", lr = 0.02 }
lr_schedule = { scaling = "none" }
method = { name = "diloco", sync_every = 2 }
training = { epochs = 1, steps = 5, log_every = 1 }
"""
CONVOLUTIONS = ("--model.name", "train.export.models_of_tests:convolutions", "--model.arguments", "{}")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    make_store(folder / "small.h5")
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    return write_text(folder, "bytes")


@pytest.fixture(scope="module")
def gpt_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(text, tmp_path_factory.mktemp("run") / "gpt", "--parallel.groups", "2", n=2)


def write_text(folder: Path, tokenizer: str) -> Path:
    (folder / "a.txt").write_text("\n\n".join(f"the {n}th of them, √{n}" for n in range(40)))
    convert_text([folder / "a.txt"], folder / "text.h5", tokenizer, test=[folder / "a.txt"], between="")
    (folder / "job.toml").write_text(GPT)
    return folder / "job.toml"


def trained(job_file: Path, folder: Path, *options: str, n: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, load(job_file, [*options, "--run.output_dir", str(folder)]))
    train(job_file, folder, *options, n=n)
    return folder


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert x.dtype == other[name].dtype, name
        assert torch.equal(x, other[name]), name


def left(run: Path) -> dict[str, Tensor]:
    return torch.load(run / "model.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_what_is_exported_is_the_model_to_the_bit(gpt_run: Path, tmp_path: Path, kind: str) -> None:
    line = export(gpt_run, kind, tmp_path / "out")
    assert line == f"{tmp_path}/out: 9 tensors, 2,840 numbers, from {gpt_run}/model.pt after step 5"
    model = models.gpt(256, width=8, layers=1, heads=2)
    load_into(model, tmp_path / "out")
    assert_same(dict(model.state_dict()), left(gpt_run))


@pytest.mark.slow
def test_tied_weights_are_there_once_and_the_library_itself_reads_them(gpt_run: Path, tmp_path: Path) -> None:
    import safetensors
    import safetensors.torch

    path = tmp_path / "model.safetensors"
    export(gpt_run, to=path)
    with safetensors.safe_open(path, framework="pt") as file:
        said, names = file.metadata(), set(file.keys())
    assert said["scores.weight"] == "embedding.weight"
    assert path.stat().st_mode == (gpt_run / "model.pt").stat().st_mode
    assert names == left(gpt_run).keys() - {"scores.weight"}
    assert (said["method"], said["step"], len(said["job"])) == ("diloco", "5", 64)
    model = models.gpt(256, width=8, layers=1, heads=2)
    safetensors.torch.load_model(model, path)
    assert_same(dict(model.state_dict()), left(gpt_run))
    untied = models.gpt(256, width=8, layers=1, heads=2, tied=False)
    load_into(untied, path)
    assert_same(dict(untied.state_dict()), left(gpt_run))


def test_torch_reads_dcp_without_a_process_group(gpt_run: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

    export(gpt_run, "dcp", tmp_path / "out")
    state = models.gpt(256, width=8, layers=1, heads=2).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_distributed(state, checkpoint_id=tmp_path / "out")
    assert_same(dict(state), left(gpt_run))
    assert json.loads((tmp_path / "out" / "hpcsgd.json").read_text())["step"] == "5"


SHAPES = {
    "two groups of two": (4, "--parallel.groups 2 --data.group_batch_size 8 --method.sync_every 2"),
    "three groups": (3, "--parallel.groups 3 --data.group_batch_size 4 --method.sync_every 3"),
    "by channels": (
        4,
        "--parallel.groups 2 --data.group_batch_size 8 --method.sync_every 2 --training.channels_last true",
    ),
    "16 bits": (
        4,
        "--parallel.groups 2 --data.group_batch_size 8 --method.sync_every 2 "
        "--training.precision bf16_master",
    ),
    "a server": (
        3,
        "--parallel.groups 3 --data.group_batch_size 4 --method.name ssp --method.max_staleness 1",
    ),
    "push-sum": (4, "--parallel.groups 4 --data.group_batch_size 2 --method.name sgp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_of_a_checkpoint_it_is_the_mean_of_the_groups(images: Path, tmp_path: Path, name: str) -> None:
    """One process computes the ranks' final model from their checkpoint, except for the order of sums."""
    n, words = SHAPES[name]
    job_file = images.parent / "own.toml"
    job_file.write_text(images.read_text().replace("sync_every = 2", ""))
    run = trained(job_file, tmp_path / "run", *words.split(), *CONVOLUTIONS, n=n)
    expected = left(run)
    (run / "model.pt").unlink()
    assert f"from {run}/checkpoints/step-" in export(run)
    found = read(run / "model.safetensors")
    assert found.keys() == expected.keys()
    for what, x in expected.items():
        assert x.dtype == found[what].dtype
        torch.testing.assert_close(
            found[what], x, rtol=0.01 if x.dtype == torch.bfloat16 else 1e-5, atol=1e-7
        )
        if name in ("two groups of two", "by channels") and "running" not in what:
            assert torch.equal(found[what], x), "of two numbers there is one mean"


def test_a_run_that_went_on_is_recognized_by_its_checkpoint(text: Path, tmp_path: Path) -> None:
    run = trained(text, tmp_path / "run")
    later = (run / "model.pt").stat().st_mtime + 10
    for manifest in (run / "checkpoints").glob("*/manifest.json"):
        os.utime(manifest, (later, later))
    assert "/checkpoints/step-00000005 after step 5" in export(run, to=tmp_path / "out")
    assert_same(read(tmp_path / "out"), left(run))


def refusal(run: Path, kind: str = "safetensors", to: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        export(run, kind, to)
    return str(caught.value)


def test_what_cannot_be_exported(gpt_run: Path, text: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    assert refusal(gpt_run, "onnx") == "no format 'onnx'; Allowed: dcp, hf, safetensors"
    assert refusal(gpt_run, to=there) == f"{there}: there already: remove it, or name another place by --to"
    assert refusal(gpt_run, to=tmp_path / "a" / "b") == f"{tmp_path}/a/b: there is no folder {tmp_path}/a"
    assert refusal(tmp_path) == f"{tmp_path}: not the folder of a run: there is no job.toml"
    write_config(tmp_path, load(text))
    assert refusal(tmp_path) == f"{tmp_path}: neither model.pt nor a checkpoint: there is no model yet"
    assert refusal(gpt_run, "hf") == (
        f"{gpt_run}: [model] name = 'gpt' is no model of the library `transformers`: use --format "
        "safetensors or dcp"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"there", "job.toml"}, "and nothing stays"


def test_without_the_library(gpt_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert refusal(gpt_run, to=tmp_path / "x") == 'needs the library `safetensors`: pip install "hpcsgd[hf]"'


@pytest.mark.parametrize("kind", FORMATS)
def test_what_fails_half_way_is_not_there(
    gpt_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def full(path: Path) -> None:
        assert path.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hpcsgd.files.atomic.reach_disk", full)
    monkeypatch.setattr("hpcsgd.train.export.formats.pretrained", lambda _: Saving())
    target = tmp_path / "out"
    assert refusal(gpt_run, kind, target) == f"{target}: cannot be written (No space left on device)"
    assert not list(tmp_path.iterdir())


class Saving:
    """A stand-in for a model of the library `transformers`."""

    config = SimpleNamespace(eos_token_id=0)

    def save_pretrained(self, folder: Path) -> None:
        (folder / "model.safetensors").touch()


def test_the_command(gpt_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["export", str(gpt_run), "--format", "dcp", "--to", str(tmp_path / "out")])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/out: 9 tensors, ")
    with pytest.raises(SystemExit) as left_with:
        main(["export", str(tmp_path)])
    assert left_with.value.code == 1
    line = f"hpcsgd: {tmp_path}: not the folder of a run: there is no job.toml\n"
    assert capsys.readouterr() == ("", line)
