"""Tests of sparse gradient reductions in a job file: their parts, their errors, and their saved state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.method import Method
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from hpcsgd.parts.grad_reduces import (
    ErrorFeedback,
    LrInErrorFeedback,
    MomentumCorrection,
    Plain,
    Sparse,
    per_worker,
    union,
)
from hpcsgd.parts.sparsifiers import CLTk, Deft, ExDyna, HardThreshold, MiCRO, TopK
from hpcsgd.train.training_setup import assemble
from train.interruptions import assert_interruptions_change_nothing, train, without_pictures
from train.launches import JOB, make_store

DEFT = '{name="deft",density=0.05}'


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", 200)
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


def method_of(job_file: Path, words: Sequence[str]) -> Method:
    def one(world: Communicator) -> Method:
        return assemble(load(job_file, words), form(world, None), "job.toml").optimizer.method

    return threads.run(1, one)[0]


def grad_reduce(**keys: str) -> list[str]:
    inside = ",".join(f"{key}={value}" for key, value in keys.items())
    return ["--method.grad_reduce", f'{{name="sparse",{inside}}}']


MADE = {
    "the usual": ({"sparsifier": DEFT}, (Deft(0.05), union, ErrorFeedback(), None)),
    "own values": (
        {"sparsifier": '{name="topk",density=0.1}', "combine": '"per_worker"', "indices": '"plain"'},
        (TopK(0.1), per_worker, ErrorFeedback(), Plain()),
    ),
    "rate inside": (
        {"sparsifier": '{name="clt_k",density=0.1}', "feedback": '"lr_in_error_feedback"'},
        (CLTk(0.1), union, LrInErrorFeedback(), None),
    ),
    "momentum correction": (
        {
            "sparsifier": '{name="hard_threshold",threshold=0.2}',
            "feedback": '{name="momentum_correction",momentum=0.5}',
        },
        (HardThreshold(0.2), union, MomentumCorrection(0.5), None),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_parts_of_parts(job_file: Path, name: str) -> None:
    keys, (sparsifier, combine, feedback, indices) = MADE[name]
    made = method_of(job_file, grad_reduce(**keys)).grad_reduce
    assert isinstance(made, Sparse)
    assert (made.sparsifier, made.combine, made.feedback) == (sparsifier, combine, feedback)
    assert indices is None or made.indices == indices


def test_parts_that_follow_the_density(job_file: Path) -> None:
    micro, exdyna = '{name="micro",density=0.05}', '{name="exdyna",density=0.1,compare_neighbours=true}'
    made = [method_of(job_file, grad_reduce(sparsifier=each)).grad_reduce for each in (micro, exdyna)]
    first, second = [each.sparsifier for each in made if isinstance(each, Sparse)]
    assert isinstance(first, MiCRO)
    assert first.density == 0.05
    assert isinstance(second, ExDyna)
    assert (second.density, second.compare_neighbours) == (0.1, True)


WRONG = {
    "no sparsifier": ({}, r"\[method\] grad_reduce: Sparse needs 'sparsifier'"),
    "a misspelt one": (
        {"sparsifier": '{name="deaft",density=0.1}'},
        r"\[method\] grad_reduce sparsifier name: no 'deaft'; did you mean 'deft'\? Allowed: clt_k, deft, ",
    ),
    "a misspelt MiCRO": (
        {"sparsifier": '{name="mirco",density=0.1}'},
        r"\[method\] grad_reduce sparsifier name: no 'mirco'; did you mean 'micro'\?",
    ),
    "a misspelt ExDyna": (
        {"sparsifier": '{name="exdina",density=0.1}'},
        r"\[method\] grad_reduce sparsifier name: no 'exdina'; did you mean 'exdyna'\?",
    ),
    "parts that are no switch": (
        {"sparsifier": '{name="exdyna",density=0.1,compare_neighbours=3}'},
        r"grad_reduce sparsifier: .*compare_neighbours = 3: expected bool",
    ),
    "parts of nothing": (
        {"sparsifier": '{name="micro",density=0}'},
        r"\[method\] grad_reduce sparsifier: density = 0: the share of elements to send, > 0 and ≤ 1",
    ),
    "a part of each": (
        {"sparsifier": '{name="exdyna",density=0.1}', "combine": '"per_worker"'},
        r"with ExDyna one worker selects each element",
    ),
    "no density": ({"sparsifier": '"topk"'}, r"\[method\] grad_reduce sparsifier: TopK needs 'density'"),
    "too much": (
        {"sparsifier": '{name="deft",density=2}'},
        r"\[method\] grad_reduce sparsifier: density = 2: the share of elements to send, > 0 and ≤ 1",
    ),
    "an argument too many": (
        {"sparsifier": DEFT, "indices": '{name="gaps",bits=3}'},
        r"\[method\] grad_reduce indices: Gaps has no argument 'bits'; it takes none",
    ),
    "another part": (
        {"sparsifier": DEFT, "codec": '"gaps"'},
        r"grad_reduce: Sparse has no argument 'codec'",
    ),
    "not together": (
        {"sparsifier": DEFT, "combine": '"per_worker"'},
        r"with Deft one worker selects each element",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_one_line(job_file: Path, name: str) -> None:
    keys, message = WRONG[name]
    words = grad_reduce(**keys) if keys else ["--method.grad_reduce", "sparse"]
    with pytest.raises(JobError, match=message) as caught:
        method_of(job_file, words)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("sparsifier", [DEFT, '{name="sidco",density=0.05}', '{name="exdyna",density=0.05}'])
def test_a_run_killed_in_mid_epoch_ends_as_if_it_had_not_been(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sparsifier: str
) -> None:
    words = "--parallel.groups 2 --data.group_batch_size 8 --training.epochs 2"
    model = (
        "--training.checkpoint_every_steps 2 --model.name train.small:steady --model.arguments {inputs=36}"
    )
    options = [*grad_reduce(sparsifier=sparsifier), *words.split(), *model.split()]
    without_pictures(monkeypatch)
    assert_interruptions_change_nothing(job_file, tmp_path, *options)


@pytest.mark.slow
def test_what_is_recorded(job_file: Path, tmp_path: Path) -> None:
    words = "--parallel.groups 1 --data.group_batch_size 8 --training.epochs 1"
    options = [*grad_reduce(sparsifier=DEFT), *words.split()]
    train(job_file, tmp_path / "run", *options, n=2)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    sparse = [record for record in map(json.loads, lines) if record["kind"] == "method"]
    assert [record["step"] for record in sparse] == list(range(1, len(sparse) + 1))
    assert all(0.03 < record["density"] < 0.07 and record["error"] > 0 for record in sparse)
    assert {"select_seconds", "encode_seconds", "combine_seconds", "apply_seconds"} < set(sparse[0])
    phases = {phase for record in map(json.loads, lines) for phase in record.get("phase_bytes", ())}
    assert {"allocation", "indices", "values"} <= phases
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["mean_density"] == pytest.approx(0.05, rel=0.2)
