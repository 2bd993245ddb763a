"""Tests of buckets that a few trial steps choose: what the run uses, saves and reports."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcsgd.cluster.batch import Allocation, check_training
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import MethodSection, load
from hpcsgd.core.step import GroupGradReduce
from hpcsgd.core.topology import Topology, form
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, bsp
from hpcsgd.parts.grad_reduces import ReduceScatter
from hpcsgd.train import pace
from hpcsgd.train.parts import make_method
from hpcsgd.train.predicted import predicted
from hpcsgd.train.reduce_settings import BUCKETS_MB, DENSE, ReduceSettings, left_open
from hpcsgd.train.training_setup import TrainingSetup, assemble
from train.interruptions import Never, without_pictures
from train.launches import JOB, launch, make_store

a_run = importlib.import_module("hpcsgd.train.run")  # the package has a function of that name
TWO = ("--parallel.groups", "1", "--model.name", "train.small:steady", "--model.arguments", "{ inputs = 36 }")


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    without_pictures(monkeypatch)
    monkeypatch.setattr(pace, "gc", SimpleNamespace(collect=lambda: None))  # it is slow
    return tmp_path / "job.toml"


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> dict[ReduceSettings, float]:
    """Return the reported seconds per step on rank 0, by settings; rank 1 reports one percent more."""
    told: dict[ReduceSettings, float] = {}
    tried: dict[int, Any] = {}

    def assembled(config: Any, topology: Topology, source: str) -> TrainingSetup:
        tried[topology.rank] = config
        return assemble(config, topology, source)

    def times(parts: TrainingSetup, batch_size: int, steps: int) -> list[float]:
        config = tried[parts.optimizer.topology.rank]
        assert batch_size == config.data.group_batch_size
        grad_reduce = config.method.arguments.get("grad_reduce")
        seconds = told[
            ReduceSettings(config.training.bucket_cap_mb, config.training.overlap_grad_reduce, grad_reduce)
        ]
        parts.optimizer.topology.world.barrier()
        return [99.0] + [seconds + 0.01 * parts.optimizer.topology.rank] * (steps - 1)

    monkeypatch.setattr(pace, "assemble", assembled)
    monkeypatch.setattr(pace, "_times", times)
    return told


def chosen(job_file: Path, *words: str, resume: bool = False) -> Any:
    def one(world: Communicator) -> Any:
        config = load(job_file, [*TWO, "--run.output_dir", str(job_file.parent / "run"), *words])
        return pace.tuned(config, form(world, 1), str(job_file), resume)

    first, second = threads.run(2, one)
    assert first == second
    return first


def test_the_fastest_is_taken(job_file: Path, paces: dict[ReduceSettings, float], caplog: Any) -> None:
    caplog.set_level("INFO")
    usual, other = DENSE
    paces |= {ReduceSettings(size, True, usual): 1.0 for size in BUCKETS_MB} | {
        ReduceSettings(4.0, True, usual): 0.5
    }
    paces |= {ReduceSettings(4.0, True, other): 0.7, ReduceSettings(4.0, False, usual): 0.6}
    config = chosen(job_file, "--training.autotune_steps", "3")
    training = config.training
    assert (training.bucket_cap_mb, training.overlap_grad_reduce) == (4.0, True)
    assert training.autotune_steps is None
    assert config.method.arguments == {"sync_every": 2, "grad_reduce": usual}
    paces |= {ReduceSettings(4.0, True, other): 0.45, ReduceSettings(4.0, False, other): 0.4}
    caplog.clear()
    config = chosen(job_file, "--training.autotune_steps", "3")
    assert (config.training.bucket_cap_mb, config.training.overlap_grad_reduce) == (4.0, False)
    assert config.method.arguments == {"sync_every": 2, "grad_reduce": other}
    by_rank: dict[int | None, list[str]] = {}  # each rank is a thread
    for record in caplog.records:
        if record.name == pace.log.name:
            by_rank.setdefault(record.thread, []).append(record.getMessage())
    taken = "bucket_cap_mb = 4, overlap_grad_reduce = false, grad_reduce = reduce_scatter"
    for messages in by_rank.values():
        assert messages[-2] == f"0.41 s a step with {taken}: taken"
        assert "to other bits: job.toml keeps these" in messages[-1]


def test_what_is_said_is_not_tried(job_file: Path, paces: dict[ReduceSettings, float]) -> None:
    said = ("--training.autotune_steps", "1", "--method.grad_reduce", "quantized")
    paces |= {ReduceSettings(7.0, overlap, "quantized"): 1.0 + overlap for overlap in (True, False)}
    config = chosen(job_file, *said, "--training.bucket_cap_mb", "7")
    assert (config.training.bucket_cap_mb, config.training.overlap_grad_reduce) == (7.0, False)
    assert config.method.arguments["grad_reduce"] == "quantized"
    paces |= {ReduceSettings(size, False, "quantized"): size for size in BUCKETS_MB}
    training = chosen(job_file, *said, "--training.overlap_grad_reduce", "false").training
    assert (training.bucket_cap_mb, training.overlap_grad_reduce) == (1.0, False)


def scattered(grad_reduce: GroupGradReduce = ReduceScatter()) -> Method:  # noqa: B008 - frozen
    return bsp(grad_reduce)


INSIDE = {"name": "hierarchical", "sync_every": 2}
SCATTERED = {"grad_reduce": "reduce_scatter"}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("bsp", {}, SCATTERED),
        ("bsp", {"grad_reduce": {"name": "alltoall"}}, None),
        ("allreduce_local_sgd", {"sync_every": 2}, None),
        ("train.test_pace:scattered", {}, None),
        ("delayed", {"method": INSIDE, "sync_delay": 1}, {"method": INSIDE | SCATTERED, "sync_delay": 1}),
        (
            "switch",
            {"first": "bsp", "then": INSIDE, "at": 1},
            {"first": {"name": "bsp"} | SCATTERED, "then": INSIDE | SCATTERED, "at": 1},
        ),
    ],
)
def test_where_a_gradient_reduction_may_be_chosen(
    job_file: Path, name: str, arguments: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    config = replace(load(job_file), method=MethodSection(name=name, arguments=arguments))
    assert left_open(config, 1).grad_reduces == (None,)
    choices = left_open(config, 2).grad_reduces
    assert choices == ((None,) if expected is None else DENSE)
    found = ReduceSettings(1.0, True, choices[-1]).within(config)
    assert found.method.arguments == (arguments if expected is None else expected)
    make_method(found.method, steps_per_epoch=3)


def test_real_steps_leave_nothing_behind(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The following run has the bits of a run that was given the same settings."""
    monkeypatch.setattr(a_run, "Stopping", Never)
    folder = job_file.parent

    def one(world: Communicator, name: str, *words: str) -> None:
        config = load(job_file, [*TWO, "--run.output_dir", str(folder / name), *words])
        reasons: Any = None
        a_run.train(config, form(world, 1), "job.toml", reasons, resume=False)

    threads.run(2, one, "tuned", "--training.autotune_steps", "1")
    table = read_toml(folder / "tuned" / "job.toml")
    training, grad_reduce = table["training"], table["method"]["grad_reduce"]
    assert training["bucket_cap_mb"] in BUCKETS_MB
    overlap = str(training["overlap_grad_reduce"]).lower()
    told = (
        "--training.bucket_cap_mb",
        str(training["bucket_cap_mb"]),
        "--training.overlap_grad_reduce",
        overlap,
    )
    threads.run(2, one, "told", *told, "--method.grad_reduce", grad_reduce)
    tuned, plain = (torch.load(folder / name / "model.pt") for name in ("tuned", "told"))
    assert all(torch.equal(value, plain[name]) for name, value in tuned.items())
    kept = chosen(
        job_file, "--training.autotune_steps", "1", "--run.output_dir", str(folder / "tuned"), resume=True
    )
    assert (kept.training.bucket_cap_mb, kept.training.overlap_grad_reduce) == (
        training["bucket_cap_mb"],
        training["overlap_grad_reduce"],
    )
    assert kept.method.arguments["grad_reduce"] == grad_reduce


MACHINE = """\
format = 1
[machine]
hosts = 1
ranks_per_host = 2
[compute]
numel = {numel}
batch_sizes = [8]
forward_seconds_by_batch = [1e-3]
backward_seconds_by_batch = [2e-3]
mean_seconds_per_element = 1e-9
[compute.busy]
backward = {busy}
[[link]]
operation = "any"
kind = "inside"
alpha_seconds = [1e-6]
beta_seconds_per_byte = [1e-9]
[[link]]
operation = "reduce_scatter"
kind = "inside"
alpha_seconds = [1e-6]
beta_seconds_per_byte = [{scatter}]
"""
MLP = ("--model.name", "mlp", "--model.arguments", "{ inputs = 36, hidden = [8] }")
NUMEL = 36 * 8 + 8 + 8 * 10 + 10


def by_machine(job_file: Path, numel: int = NUMEL, busy: float = 1.0, scatter: float = 1e-9) -> Any:
    """Return the settings that a machine file gives an mlp, whose parameters all fit into one bucket."""
    (job_file.parent / "machine.toml").write_text(MACHINE.format(numel=numel, busy=busy, scatter=scatter))
    job_file.write_text(JOB + 'machine = "machine.toml"\nbucket_cap_mb = 1\n')
    return chosen(job_file, *MLP)


def test_a_machine_file_tells_it_without_a_step(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's times decide, without a trial step.

    A reduce-scatter leaves no mean to compute. If a busy communication thread slows computing down by more
    than it hides, nothing is sent early.
    """
    monkeypatch.setattr(pace, "assemble", None)
    config = by_machine(job_file)
    assert (config.training.bucket_cap_mb, config.training.overlap_grad_reduce) == (1.0, True)
    assert (config.method.arguments["grad_reduce"], config.training.machine) == ("reduce_scatter", None)
    assert by_machine(job_file, scatter=1e-7).method.arguments["grad_reduce"] == "alltoall"
    assert by_machine(job_file, busy=9.0).training.overlap_grad_reduce is False


def test_parameters_that_come_late_are_predicted(job_file: Path) -> None:
    """With `overlap_param_gather` the predicted time is less for all settings.

    The layers that run first do not wait for all parameters.
    """
    by_machine(job_file)
    words = ("--parallel.groups", "1", "--training.bucket_cap_mb", "1e-4", *MLP)
    at_once, late = (
        predicted(load(job_file, [*words, *more]), 1, 2, job_file.parent / "machine.toml", 2)
        for more in ([], ["--training.overlap_param_gather", "true"])
    )
    assert late.keys() == at_once.keys()
    assert all(late[sending] < seconds for sending, seconds in at_once.items())


def test_both_methods_of_a_switch_are_predicted(job_file: Path) -> None:
    by_machine(job_file)
    machine = job_file.parent / "machine.toml"
    machine.write_text(machine.read_text().replace("e-3]", "e-6]"))  # a message takes as long as a pass

    def seconds(method: str) -> float:
        given = [
            "--training.epochs",
            "4",
            "--training.bucket_cap_mb",
            "1",
            "--training.overlap_grad_reduce",
            "false",
        ]
        config = load(job_file, [*given, *MLP, "--method", method])
        return min(predicted(config, 2, 1, machine, 2).values())

    first, then = '{ name = "bsp" }', '{ name = "hierarchical", sync_every = 2 }'
    both = f'{{ name = "switch", first = {first}, then = {then}, at = {{ epoch = 1 }} }}'
    mean = 0.25 * seconds(first) + 0.75 * seconds(then)
    assert seconds(both) == pytest.approx(mean, rel=0.02)
    assert seconds(first) > 1.1 * mean


def test_a_machine_file_of_another_model(job_file: Path) -> None:
    with pytest.raises(UserError, match=r"machine: .*numel = 7: the job's model has 386 parameters"):
        by_machine(job_file, numel=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "choices"),
    [
        ("--training.autotune_steps 1 --training.bucket_cap_mb 1 --training.overlap_grad_reduce true", 2),
        ("--training.machine machine.toml", 12),
    ],
)
def test_processes_choose_the_same(tmp_path: Path, asked: str, choices: int) -> None:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "machine.toml").write_text(MACHINE.format(numel=NUMEL, busy=1.0, scatter=1e-9))
    end = launch(tmp_path, "train", "job.toml", "--parallel.groups", "1", *asked.split(), n=2)
    assert end.code == 0, end.err
    told = [line for line in end.out.splitlines() if " s a step with bucket_cap_mb" in line]
    (taken,) = (line for line in told if line.endswith(": taken"))
    assert len(told) == choices
    table = read_toml(tmp_path / "runs" / "job" / "job.toml")
    way = ReduceSettings(
        *(table["training"][key] for key in ("bucket_cap_mb", "overlap_grad_reduce")),
        table["method"]["grad_reduce"],
    )
    assert f" s a step with {way}: taken" in taken
    assert not {"autotune_steps", "machine"} & table["training"].keys()


def test_a_batch_job_is_refused_a_machine_file_of_another_model(job_file: Path) -> None:
    text = MACHINE.format(numel=7, busy=1.0, scatter=1e-9)
    (job_file.parent / "machine.toml").write_text(text)
    job_file.write_text(JOB + 'machine = "machine.toml"\n')
    with pytest.raises(UserError, match=r"\[training\] machine: .*numel = 7"):
        check_training(job_file, ["--parallel.groups", "1"], Allocation(ranks_per_node=2))


def test_one_of_both(job_file: Path) -> None:
    with pytest.raises(UserError, match=r"autotune_steps = 1 and machine = .*give one of them, not both"):
        load(job_file, ["--training.autotune_steps", "1", "--training.machine", "machine.toml"])


def test_the_optimizer_is_given_the_choice(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    real = DistributedOptimizer.__init__
    monkeypatch.setattr(DistributedOptimizer, "__init__", lambda *a, **k: given.append(k) or real(*a, **k))

    def one(world: Communicator) -> None:
        words = ["--training.bucket_cap_mb", "0.5", "--training.overlap_grad_reduce", "false"]
        assemble(load(job_file, [*TWO, *words]), form(world, 1), "job.toml")

    threads.run(2, one)
    assert [(each["bucket_cap_mb"], each["overlap_grad_reduce"]) for each in given] == [(0.5, False)] * 2
