"""Tests that whole runs of 2 x 2 ranks on a device train the same model as on the host.

They cover every precision, natural gradient, Muon, sparse gradient reductions and quantization. With `--on-
devices cuda` they use real devices and allow for their rounding.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hpcsgd
from far.ranks import tolerance
from hpcsgd.comm import Communicator
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from train.interruptions import without_pictures
from train.launches import JOB, make_store
from train.test_on_device import StopsAfter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("any_device")]

a_run = importlib.import_module("hpcsgd.train.run")  # the package has a function of that name
FOUR = ["--parallel.groups", "2", "--data.group_batch_size", "8", "--training.epochs", "2"]
FLOAT32, FLOAT16 = 1e-4, 5e-2
"""The tolerances for models that were trained on different devices for a dozen steps."""


def sparse(**sparsifier: object) -> list[str]:
    pairs = ",".join(
        f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}"
        for key, value in sparsifier.items()
    )
    return ["--method.grad_reduce", f'{{name="sparse",sparsifier={{{pairs}}}}}']


def packed(wire: str) -> list[str]:
    return [
        "--method.grad_reduce",
        f'{{name="quantized",gradients="{wire}",parameters="{wire}"}}',
        "--method.quantize",
        wire,
    ]


RUNS: dict[str, tuple[list[str], float]] = {
    "fp32": ([], FLOAT32),
    "bf16": (["--training.precision", "bf16"], FLOAT16),
    "fp16": (["--training.precision", "fp16"], FLOAT16),
    "bf16_master": (["--training.precision", "bf16_master"], FLOAT16),
    "natural gradient": (["--optimizer.natural_gradient.rank", "2"], FLOAT32),
    "Muon": (["--optimizer.name", "Muon"], FLOAT16),
    "Top-k": (sparse(name="topk", density=0.1), FLOAT32),
    "DEFT": (sparse(name="deft", density=0.1), FLOAT32),
    "CLT-k": (sparse(name="clt_k", density=0.1), FLOAT32),
    "MiCRO": (sparse(name="micro", density=0.1), FLOAT32),
    "ExDyna": (sparse(name="exdyna", density=0.1), FLOAT32),
    "a hard threshold": (sparse(name="hard_threshold", threshold=0.01), FLOAT32),
    "SIDCo": (sparse(name="sidco", density=0.1), FLOAT32),
    "bf16 wires": (packed("bf16"), FLOAT16),
    "int8 wires": (packed("int8"), FLOAT16),
    "int4 wires": (packed("int4"), FLOAT16),
}
RARELY = ("a hard threshold", "SIDCo", "CLT-k", "ExDyna", "MiCRO", "int8 wires")
"""Runs of parts whose like is in `RUNS` as well; for `make test-long`."""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5")
    text = JOB.replace('"mlp"', '"train.small:steady"').replace("hidden = [8]", "norm = false")
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("hpcsgd.train.static_run._report", lambda _: None)
    monkeypatch.setattr("hpcsgd.comm.backend_choice.launched", lambda *_: None)
    started_low = functools.partial(hpcsgd.GradScaler, init_scale=1024.0)  # no step is skipped
    monkeypatch.setattr("hpcsgd.engine.precision.GradScaler", started_low)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    without_pictures(monkeypatch)
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def trained(
    world: Communicator,
    job_file: Path,
    folder: Path,
    on: str,
    words: list[str],
    stop: int | None = None,
    resume: bool = False,
) -> dict[str, Tensor]:
    """Train, and return the model of the finished run, or nothing for one that stopped."""
    config = load(job_file, [*FOUR, *words, "--training.device", on, "--run.output_dir", str(folder)])
    reasons: Any = None
    a_run.train(config, form(world, config.parallel.groups), "job.toml", reasons, resume)
    world.barrier()
    return torch.load(folder / "model.pt") if stop is None else {}


@pytest.mark.ranks(4)
@pytest.mark.threads(unless={"name": {"bf16_master"}})
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in RARELY else []) for name in RUNS]
)
def test_the_model_is_the_one_of_the_host(
    run, name: str, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, otherwise = RUNS[name]
    monkeypatch.setattr(a_run, "Stopping", lambda *_: StopsAfter(None))
    expected = run(4, trained, job_file, tmp_path / "host", "cpu", words)[0]
    found = run(4, trained, job_file, tmp_path / "device", "auto", words)[0]
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.is_cpu
        told = functools.partial("{}: {}".format, key)
        torch.testing.assert_close(value, expected[key], msg=told, **tolerance(True, otherwise))


@pytest.mark.ranks(4)
@pytest.mark.threads(unless={"name": {"bf16"}})
@pytest.mark.parametrize(
    "name",
    ["bf16", "natural gradient", *(pytest.param(name, marks=pytest.mark.long) for name in ("fp32", "DEFT"))],
)
def test_deterministic_runs_have_the_same_bits(
    run, name: str, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run and a restarted run have the same bits."""
    words = [*RUNS[name][0], "--training.deterministic", "true"]
    monkeypatch.setattr(a_run, "Stopping", lambda *_: StopsAfter(None))
    first = run(4, trained, job_file, tmp_path / "first", "auto", words)[0]
    second = run(4, trained, job_file, tmp_path / "second", "auto", words)[0]
    monkeypatch.setattr(a_run, "Stopping", lambda *_: StopsAfter(4))
    run(4, trained, job_file, tmp_path / "third", "auto", words, 4)
    monkeypatch.setattr(a_run, "Stopping", lambda *_: StopsAfter(None))
    third = run(4, trained, job_file, tmp_path / "third", "auto", words, None, True)[0]
    for other in (second, third):
        assert first.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in first.items())
