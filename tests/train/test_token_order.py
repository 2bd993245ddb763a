"""Tests that a language model gets the same tokens in the same order on any P × K, also after a resume.

The tests compare a hash of all tokens of each step, as the model gets them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.data import AsRank, Loader, Sampler, Windows, convert_text
from hpcsgd.errors import JobError
from hpcsgd.train.training_setup import assemble
from train import small
from train.interruptions import train, without_pictures

B = 24
"""The windows of a step, over all groups."""
JOB = """
data = { path = "text.h5", group_batch_size = 24, arguments = { bptt = 6 } }
model = { name = "gpt", arguments = { types = 256, width = 8, layers = 1, heads = 2 } }
optimizer = { name = "Adam", lr = 0.02 }
lr_schedule = { scaling = "none" }
method = { name = "hierarchical", sync_every = 2 }
training = { epochs = 2, log_every = 1 }
"""
SHAPES = [(1, 1), (2, 1), (3, 3), (4, 2), (8, 4)]
"""Pairs of ranks and groups."""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    folder = tmp_path / str(os.getpid())  # under mpiexec every rank makes its own folder
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("\n\n".join(f"the {n}th of them, √{n}" for n in range(40)))
    convert_text([folder / "a.txt"], folder / "text.h5", "bytes", test=[folder / "a.txt"], between="")
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


def digest(ranks: list[Tensor]) -> str:
    """Return a hash of all tokens of a step, given those of each rank; first windows come first."""
    return hashlib.sha256(torch.stack(ranks, dim=1).numpy().tobytes()).hexdigest()


def expected(job_file: Path, epochs: int) -> list[str]:
    """Return the hashes of a single loader, outside of a run."""
    data = Windows(job_file.parent / "text.h5", "train", bptt=6)
    loader = Loader(data, B, Sampler(data, AsRank(0, 1), seed=1))
    return [digest([x]) for _ in range(epochs) for x, _ in loader]


def shape(P: int) -> tuple[str, ...]:
    return ("--parallel.groups", str(P), "--data.group_batch_size", str(B // P))


@pytest.mark.parametrize(("n", "groups"), [(1, 1), (2, 2), (2, 1), (4, 2), (8, 4)])
def test_what_the_ranks_of_a_job_load(
    run: Callable[..., list[Any]], job_file: Path, n: int, groups: int
) -> None:
    """The test runs on threads and on processes."""

    def loaded(world: Communicator) -> list[Tensor]:
        parts = assemble(load(job_file, shape(groups)), form(world, groups), "job.toml")
        return [x for x, _ in parts.loader]

    steps = list(zip(*run(n, loaded), strict=True))
    assert [digest(list(step)) for step in steps] == expected(job_file, 1)


@pytest.mark.slow
@pytest.mark.parametrize("before", SHAPES)
def test_a_run_goes_on_with_another_shape(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[int, int]
) -> None:
    """The run resumes with another shape in the middle of an epoch."""
    without_pictures(monkeypatch)
    whole = expected(job_file, 2)
    after = SHAPES[(SHAPES.index(before) + 3) % len(SHAPES)]
    at = len(whole) // 2 - 2
    found = []
    turns: list[tuple[tuple[int, int], dict[str, Any]]] = [(before, {"at": at}), (after, {"resume": True})]
    for (n, P), where in turns:
        small.seen.clear()
        words = (*shape(P), "--data.transform", "train.small:noted")
        train(job_file, tmp_path / "run", *words, n=n, **where)
        found += [digest(list(step)) for step in zip(*(small.seen[r] for r in range(n)), strict=True)]
    assert found == whole
    assert len(set(whole)) == len(whole) > 8


@pytest.mark.ranks(1)
def test_bad_input_is_one_line_before_anything_begins(
    run: Callable[..., list[Any]], job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = job_file.parent / "text.h5"
    (job_file.parent / "other.json").write_text("{}")
    monkeypatch.chdir(job_file.parent)

    def line(world: Communicator, *words: str) -> str:
        with pytest.raises(JobError) as caught:
            assemble(load(job_file, words), form(world, 1), "job.toml")
        return str(caught.value)

    (other,) = run(1, line, "--data.arguments.tokenizer", "other.json")
    given = f"{Path.cwd()}/other.json (44136fa355b3)"
    assert other.startswith(f"job.toml: [data] arguments: tokenizer {given} is not the one that made ")
    (few,) = run(1, line, "--model.arguments.types", "255")
    assert "[model]: gpt does not take samples of shape [6]" in few
    (large,) = run(1, line, "--data.group_batch_size", "9999")
    assert "[data] group_batch_size: an epoch has " in large
    whole = store.read_bytes()
    store.write_bytes(whole[:-20])
    (short,) = run(1, line)
    assert short.startswith(f"job.toml: [data] arguments: {store}: not a dataset file, or damaged (")
    assert all("\n" not in told for told in (other, few, large, short))
