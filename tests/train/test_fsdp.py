"""Tests of `[parallel] fsdp`: runs with FSDP models train the same as runs without FSDP."""

from __future__ import annotations

import gc
import json
import shlex
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcsgd.config.schema import load
from hpcsgd.data import convert_text
from hpcsgd.errors import UserError
from hpcsgd.models import build
from hpcsgd.models.sharded import without_values
from hpcsgd.report.metrics import read
from train.launches import HPCSGD, ended, launch, start

pytestmark = pytest.mark.slow

JOB = """
seed = 4
parallel = { groups = 2 }
data = { path = "text.h5", group_batch_size = 8, arguments = { bptt = 7 } }
model = { name = "gpt", arguments = { types = 256, width = 12, layers = 2, heads = 2 } }
optimizer = { lr = 0.1, arguments = { momentum = 0.9 } }
method = { name = "hierarchical", sync_every = 2 }
training = { steps = 8, log_every = 1, checkpoint_every_steps = 4 }
"""
SHARDED = ("--parallel.fsdp", "true")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("\n\n".join(f"the {n}th of them, √{n}" for n in range(40)))
    convert_text([tmp_path / "a.txt"], tmp_path / "text.h5", "bytes", test=[tmp_path / "a.txt"], between="")
    (tmp_path / "job.toml").write_text(JOB)
    torch.manual_seed(0)
    model = build("gpt", {"types": 256, "width": 12, "layers": 2, "heads": 2})
    torch.save(model.state_dict(), tmp_path / "start.pt")
    return tmp_path


def train(folder: Path, run: str, *words: str) -> None:
    done = launch(folder, "train", "job.toml", "--run.output_dir", run, *words, n=4)
    assert done.code == 0, done.err


def assert_same(folder: Path, mine: str, theirs: str) -> None:
    assert_same_models(folder, mine, theirs)
    for ours, other in zip(*(told(folder / run) for run in (mine, theirs)), strict=True):
        assert ours == pytest.approx(other, abs=1e-5)


def assert_same_models(folder: Path, mine: str, theirs: str) -> None:
    ours, other = (torch.load(folder / run / "model.pt") for run in (mine, theirs))
    assert ours.keys() == other.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, other[name], rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def told(run: Path) -> list[float]:
    """Return the losses and distances of a run."""
    records = read(run / "metrics.jsonl")
    return [r["loss"] for r in records if r["kind"] == "eval"] + [
        r["distance"] for r in records if r["kind"] == "sync"
    ]


def test_the_run_of_groups_that_share_nothing_but_the_update(folder: Path) -> None:
    """Both runs begin equal, and each continues from the other's checkpoint."""
    start = ("--model.init_from", "start.pt")
    train(folder, "whole", *start)
    train(folder, "sharded", *start, *SHARDED, "--model.fsdp_units", '["blocks.*"]')
    assert_same(folder, "sharded", "whole")
    train(folder, "whole", "--training.steps", "12", "--resume", *SHARDED)
    train(folder, "sharded", "--training.steps", "12", "--resume")
    assert_same(folder, "whole", "sharded")
    for run, sharded_steps in {"whole": 4, "sharded": 8}.items():
        summary = json.loads((folder / run / "summary.json").read_text())
        assert summary["bytes_by_torch"] == sharded_steps * bytes_of_a_pass()


def bytes_of_a_pass() -> float:
    """Return half of what two ranks gather or sum: blocks are gathered twice, the other parameters once."""
    model = build("gpt", {"types": 256, "width": 12, "layers": 2, "heads": 2})
    inside = sum(p.numel() for name, p in model.named_parameters() if name.startswith("blocks."))
    around = sum(p.numel() for p in model.parameters()) - inside
    return 4 / 2 * (3 * inside + 2 * around)


@pytest.mark.long
def test_groups(folder: Path) -> None:
    """Two groups of two ranks average the rows of each shard index, and train the same as without FSDP."""
    words = ("--model.init_from", "start.pt", "--method.sync_every", "3", "--method.name", "ensemble_sync")
    for run, shares in (("whole", ()), ("sharded", SHARDED)):
        start = ("launch", "job.toml", "--groups", "2", "--group-size", "2")
        done = launch(
            folder,
            *start,
            "--parallel.groups",
            "1",
            "--training.steps",
            "none",
            *words,
            *shares,
            "--training.epochs",
            "1",
            "--run.output_dir",
            run,
        )
        assert done.code == 0, done.err
    assert_same_models(folder, "sharded", "whole")


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("--training.precision", "bf16"),
        ("--training.precision", "bf16_master"),
        ("--training.activation_checkpointing", "true"),
        ("--training.compile", "true"),
    ],
    ids=lambda words: words[1],
)
def test_beside_what_else_there_is(folder: Path, words: tuple[str, ...]) -> None:
    train(folder, "run", *SHARDED, *words, "--training.steps", "40", "--optimizer.lr", "0.02")
    losses = [r["loss"] for r in read(folder / "run" / "metrics.jsonl") if r["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5


def test_one_parameter_of_two_modules_stays_one() -> None:
    """No reference to the original parameter is left."""
    p = nn.Parameter(torch.ones(3))
    gone = weakref.ref(p)
    with without_values():
        model = nn.ModuleList([nn.ParameterList([p]), nn.ParameterList([p])])
        assert [x.device.type for x in model.parameters()] == ["meta"]
        del p
        gc.collect()
        assert gone() is None


@pytest.mark.long
def test_muon_resumes_within_a_period(folder: Path) -> None:
    """Step 4 updates blocks, and step 6 is the next one with whole matrices."""
    muon = ("--optimizer.name", "Muon", "--optimizer.lr", "0.01", "--optimizer.arguments.period", "3")
    train(folder, "at-once", *SHARDED, *muon)
    train(folder, "in-two", *SHARDED, *muon, "--training.steps", "4")
    train(folder, "in-two", *SHARDED, *muon, "--resume")
    ours, other = (torch.load(folder / run / "model.pt") for run in ("in-two", "at-once"))
    assert ours.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in ours.items())
    assert "muon" in json.loads((folder / "in-two" / "summary.json").read_text())["bytes_per_phase"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model.fsdp_units", '["a"]'], "[model] fsdp_units without [parallel] fsdp = true"),
        (
            [*SHARDED, "--training.overlap_param_gather", "true"],
            "[parallel] fsdp = true and [training] overlap_param_gather: leave one",
        ),
        ([*SHARDED, "--training.channels_last", "true"], "[training] channels_last: leave one of them out"),
        ([*SHARDED, "--optimizer.natural_gradient", "{}"], "[optimizer] natural_gradient: leave one"),
        (
            [*SHARDED, "--rebalance.resource", "ranks"],
            '[rebalance] resource = "ranks": leave one of them out',
        ),
    ],
)
def test_keys_that_do_not_go_together(folder: Path, words: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load(folder / "job.toml", words)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_blocks_that_are_not_there(folder: Path) -> None:
    done = launch(folder, "train", "job.toml", *SHARDED, "--model.fsdp_units", '["block.*"]', n=2)
    assert done.code == 1
    (line,) = done.messages
    assert line.startswith("hpcsgd: job.toml: units: no module 'block.*'"), line
    assert not (folder / "runs").exists()


ON_NODES = ("job", "train", "job.toml", *SHARDED, "--ranks-per-node", "4")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model.arguments.types", "200"], "expected [2, 7, 256]"),
        (
            ["--optimizer.name", "Adafactor", "--optimizer.arguments", "{}"],
            "is not known to update every element by itself",
        ),
        (
            ["--method.grad_reduce", '{ name = "sparse", sparsifier = { name = "topk", density = 0.1 } }'],
            "torch shards the parameters and reduces the gradients",
        ),
    ],
)
def test_a_batch_job_that_cannot_be(folder: Path, words: list[str], line: str) -> None:
    done = launch(folder, *ON_NODES, *words)
    assert done.code == 1
    (message,) = done.messages
    assert line in message
    assert not (folder / "runs").exists()


@pytest.mark.long
def test_a_batch_job_is_checked_where_its_model_has_no_room(folder: Path) -> None:
    """The model has half a gigabyte in 40 blocks, and training would need four times as much."""
    large = ("--model.arguments.width", "512", "--model.arguments.layers", "40")
    limited = f"ulimit -d {10**6}; exec {shlex.join([*HPCSGD, *ON_NODES, *large])}"
    done = ended(start(folder, ["bash", "-c", limited]))
    assert "ranks     4 on 1 node: 2 groups of 2, each on one node" in done.out, done.err
