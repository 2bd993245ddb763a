from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy

from full_disks import full_after
from hpcsgd.comm import Communicator, phase, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.data import ImageDataset
from hpcsgd.errors import JobError, UserError
from hpcsgd.models import mlp
from hpcsgd.report.step_timer import LARGEST, StepTimer
from hpcsgd.train.static_run import StaticRun
from hpcsgd.train.training_setup import assemble
from train.launches import JOB, launch, make_store

a_run = importlib.import_module("hpcsgd.train.run")  # the package has a function of that name
TRAIN, TEST = 48, 20
M = 36 * 8 + 8 + 8 * 10 + 10  # parameters of the model


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", TRAIN, TEST)
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


class NoStop:
    """A stand-in for `Stopping`, which handles signals and so needs the main thread."""

    def now(self) -> None:
        return None

    def at_once(self) -> None:
        return None


def train(job_file: Path, folder: Path, words: str, *, n: int = 1) -> list[dict[str, Any]]:
    """Return the metrics of a run on `n` threads, in order of steps."""

    def one(world: Communicator) -> None:
        config = load(job_file, [*words.split(), "--run.output_dir", str(folder)])
        parts = assemble(config, form(world, config.parallel.groups), "job.toml")
        stopping: Any = NoStop()
        with ExitStack() as files:
            a_run._train(
                StaticRun(config, parts.optimizer.topology),
                parts,
                stopping,
                world.dup_with_thread(),
                False,
                files,
            )

    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcsgd.train.static_run._report", lambda _: None)
        threads.run(n, one)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return sorted(records, key=lambda record: record["step"])  # a reading waits for all ranks


def kind(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == name]


def test_one_rank_is_the_plain_loop(job_file: Path, tmp_path: Path) -> None:
    words = "--training.epochs 2 --optimizer.arguments.momentum 0.9"
    records = train(job_file, tmp_path, words)
    parts: Any = []
    threads.run(1, lambda world: parts.append(assemble(load(job_file), form(world), "job.toml")))
    torch.manual_seed(1)
    net = mlp(36, [8])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    store, sampler = ImageDataset(job_file.parent / "small.h5", "train"), parts[0].sampler
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(16):
            x, y = ImageDataset.collate(store.__getitems__(rows.tolist()))
            loss = cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert [record["loss"] for record in kind(records, "step")] == losses
    trained = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(value, trained[name]) for name, value in net.state_dict().items())


def test_what_is_recorded_when(job_file: Path, tmp_path: Path) -> None:
    words = "--parallel.groups 2 --data.group_batch_size 4 --training.epochs 2 --training.log_every 4"
    records = train(job_file, tmp_path, words, n=2)
    places = [(record["kind"], record["step"], record.get("epoch")) for record in records]
    first = [("sync", 2, None), ("sync", 4, None), ("step", 4, 1), ("sync", 6, None), ("step", 6, 1)]
    second = [("sync", 8, None), ("step", 8, 2), ("sync", 10, None), ("sync", 12, None)]
    assert places == [
        *first,
        *[("epoch", 6, 1), ("eval", 6, 1)],
        *second,
        *[("step", 12, 2), ("epoch", 12, 2), ("eval", 12, 2)],
    ]
    steps = kind(records, "step")
    assert [record["samples"] for record in steps] == [32, 16, 16, 32]
    for epoch, of_epoch in ((1, steps[:2]), (2, steps[2:])):
        mean = sum(record["loss"] * record["samples"] for record in of_epoch) / TRAIN
        assert kind(records, "epoch")[epoch - 1]["loss"] == pytest.approx(mean)


def test_synchronizations_report_distance_and_bytes(job_file: Path, tmp_path: Path) -> None:
    words = "--parallel.groups 2 --data.group_batch_size 4 --training.log_every 4"
    records = train(job_file, tmp_path, words, n=2)
    assert all(0 < record["distance"] < 1 for record in kind(records, "sync"))
    first, last = kind(records, "step")
    # An allreduce of M float32 over P = 2, and of one float64 for the distance, sends 2 (P − 1) / P of it.
    assert first["phase_bytes"] == {"model_average": 2 * M * 4, "distance": 2 * 8}
    assert last["phase_bytes"] == {"model_average": M * 4, "distance": 8}


def test_synchronizations_report_a_changing_interval(job_file: Path, tmp_path: Path) -> None:
    adaptive = job_file.with_name("adacomm.toml")
    method = 'name = "adacomm"\ninitial_sync_every = 4\nadapt_every = 4'
    adaptive.write_text(JOB.replace('name = "hierarchical"\nsync_every = 2', method))
    words = "--parallel.groups 2 --data.group_batch_size 4 --training.epochs 2 --optimizer.lr 1e-6"
    records = train(adaptive, tmp_path, words, n=2)
    syncs = kind(records, "sync")
    noted = {record["step"]: record["interval"] for record in kind(records, "method")}
    assert list(noted) == list(range(1, records[-1]["step"] + 1)), "it is noted in every step"
    intervals = [noted[record["step"]] for record in syncs]
    assert intervals[0] == 4
    assert intervals[-1] < 4, "the loss did not fall"
    steps = [0, *(record["step"] for record in syncs)]
    assert [after - before for before, after in itertools.pairwise(steps)] == intervals


def test_one_group_never_synchronizes(job_file: Path, tmp_path: Path) -> None:
    records = train(job_file, tmp_path, "", n=2)
    assert kind(records, "sync") == []
    (_, _, last) = kind(records, "step")
    assert last["phase_bytes"] == {"grad_reduce": M * 4 / 2, "param_gather": M * 4 / 2}


def test_how_often_to_evaluate(job_file: Path, tmp_path: Path) -> None:
    records = train(job_file, tmp_path, "--training.epochs 5 --training.eval_every_epochs 2")
    assert [record["epoch"] for record in kind(records, "eval")] == [2, 4, 5]


STEPS = 3  # of an epoch: 48 samples in batches of 16


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ("", [0.1] * 6),
        ("--lr_schedule.name StepLR --lr_schedule.arguments.step_size 1", [0.1] * 3 + [0.01] * 3),
        (
            "--lr_schedule.name ExponentialLR --lr_schedule.arguments.gamma 0.5 --lr_schedule.interval step",
            [0.1 * 0.5**t for t in range(6)],
        ),
    ],
)
def test_the_learning_rate_is_that_of_the_step(
    job_file: Path, tmp_path: Path, words: str, rates: list[float]
) -> None:
    records = train(job_file, tmp_path, f"--training.epochs 2 {words}")
    assert [record["lr"] for record in kind(records, "step")] == pytest.approx(rates)


def test_the_warm_up_climbs_to_the_rate_of_all_groups(job_file: Path, tmp_path: Path) -> None:
    words = "--lr_schedule.scaling linear --lr_schedule.warmup_epochs 1"
    assert rates_of_two_groups(job_file, tmp_path, words) == pytest.approx(
        [0.1, 0.1 + 0.1 / 3, 0.1 + 0.2 / 3, 0.2, 0.2, 0.2]
    )


def test_a_rate_that_is_not_scaled_climbs_from_nearly_0(job_file: Path, tmp_path: Path) -> None:
    rates = rates_of_two_groups(job_file, tmp_path, "--lr_schedule.warmup_epochs 1")
    assert rates == pytest.approx([0.1 / 3, 0.5 / 9, 0.7 / 9, 0.1, 0.1, 0.1])


def test_no_rate_is_scaled_unasked(job_file: Path, tmp_path: Path) -> None:
    assert rates_of_two_groups(job_file, tmp_path, "") == [0.1] * 6


def rates_of_two_groups(job_file: Path, tmp_path: Path, words: str) -> list[float]:
    words += " --parallel.groups 2 --data.group_batch_size 8 --training.epochs 2"
    records = train(job_file, tmp_path, words, n=2)
    return [record["lr"] for record in kind(records, "step")]


@pytest.mark.parametrize(("scaling", "told"), [("linear", True), ("none", False)])
def test_one_group_is_warned_that_it_has_nothing_to_climb(
    job_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, scaling: str, told: bool
) -> None:
    caplog.set_level("INFO", "hpcsgd")
    train(job_file, tmp_path, f"--lr_schedule.scaling {scaling} --lr_schedule.warmup_epochs 1", n=1)
    assert ("lr_schedule: warmup_epochs has no effect: scaling = linear climbs" in caplog.text) is told


def poison(x: Tensor, generator: Generator) -> Tensor:
    """Return NaN for the third batch of rank 1, whose generator has this seed."""
    poison_calls[generator.initial_seed()] = calls = poison_calls.get(generator.initial_seed(), 0) + 1
    return x * math.nan if (generator.initial_seed(), calls) == (3, 3) else x


poison_calls: dict[int, int] = {}


def test_a_loss_that_is_no_number_ends_training(job_file: Path, tmp_path: Path) -> None:
    poison_calls.clear()
    words = "--parallel.groups 2 --data.group_batch_size 4 --data.transform train.test_loop:poison"
    with pytest.raises(UserError, match="the loss is nan at step 3: try a lower learning rate"):
        train(job_file, tmp_path, words, n=2)
    assert not (tmp_path / "model.pt").exists()


def test_a_last_update_that_breaks_the_model(job_file: Path, tmp_path: Path) -> None:
    """No later training loss would show it."""
    words = "--data.group_batch_size 48 --optimizer.lr 1e38"
    with pytest.raises(JobError, match="the test loss is nan at step 1: try a lower learning rate"):
        train(job_file, tmp_path, words)
    assert not (tmp_path / "model.pt").exists()
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_seconds_add_up_to_the_time_that_passed(run: Callable[..., list[Any]], n: int) -> None:
    def measured(world: Communicator) -> None:
        before = time.perf_counter()
        meter = StepTimer(form(world), world.dup_with_thread())
        began = time.perf_counter()
        time.sleep(0.05)
        if world.rank == 0:
            time.sleep(0.5)  # the others wait for this one, even if they begin late
        with phase("grad_reduce"):
            world.allreduce(torch.ones(3)).wait()
        meter.step(torch.tensor(2.0), 8, data_seconds=0.02, metrics={})
        ended = time.perf_counter()
        reading = meter.read().wait()
        after = time.perf_counter()
        seconds = reading.phase_seconds
        assert ended - began <= sum(seconds.values()) <= after - before
        assert set(seconds) == {"data", "compute", "grad_reduce"}
        assert seconds["data"] == 0.02
        assert seconds["grad_reduce"] > 0.05 if world.rank > 0 else seconds["compute"] > 0.5
        assert reading.samples_per_s == pytest.approx(8 * n / sum(seconds.values()))

    run(n, measured)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_loss_is_the_mean_over_all_samples(run: Callable[..., list[Any]], n: int) -> None:
    def measured(world: Communicator) -> tuple[float, int]:
        meter = StepTimer(form(world), world.dup_with_thread(), ["never", "ahead"])
        meter.step(torch.tensor(1.0 + world.rank), 2, 0.0, {"ahead": 3, "distance": 1.0})
        meter.step(torch.tensor(3.0), 1 + world.rank, 0.0, {"ahead": 100})
        reading = meter.read().wait()
        again = meter.read().wait()
        assert reading.counts == {"ahead": {3: n, LARGEST: n}}
        assert (again.samples, again.phase_bytes, again.counts) == (0, {}, {})
        assert again.phase_seconds["data"] == 0.0
        return reading.loss, reading.samples

    samples = sum(3 + rank for rank in range(n))
    total = sum(2 * (1 + rank) + 3 * (1 + rank) for rank in range(n))
    assert run(n, measured) == [(pytest.approx(total / samples), samples)] * n


@pytest.mark.parametrize("n", [2, 4])
def test_messages_are_counted_by_where_they_went(run: Callable[..., list[Any]], n: int) -> None:
    def measured(world: Communicator) -> list[dict[int, float]]:
        topology = form(world, groups=n)
        right, left = (topology.group_index + 1) % n, (topology.group_index - 1) % n
        meter = StepTimer(topology, world.dup_with_thread())
        found = []
        for size in (3, 5):
            sent, received = torch.zeros(size), torch.zeros(size)
            topology.inter_group.sendrecv(
                {right: sent, topology.group_index: sent},
                {left: received, topology.group_index: received.clone()},
            ).wait()
            found.append(meter.read().wait().link_bytes)
        return found

    assert run(n, measured) == [[{(g + 1) % n: 12}, {(g + 1) % n: 20}] for g in range(n)]


def hold_the_second_group(x: Tensor, generator: Generator) -> Tensor:
    """Delay the second group's second batch until the first group has its last one.

    Servers are set up in step 1, which both groups make together.
    """
    batches.append(rank := generator.initial_seed())
    if batches.count(rank) == TRAIN // 2 // 4:
        a_group_is_done.set()
    if rank == 3 and batches.count(rank) == 2:
        assert a_group_is_done.wait(60)
    return x


a_group_is_done = threading.Event()
batches: list[int] = []


def test_groups_that_wait_for_nobody_do_not_wait_for_metrics(job_file: Path, tmp_path: Path) -> None:
    a_group_is_done.clear()
    batches.clear()
    asynchronous = job_file.parent / "asynchronous.toml"
    asynchronous.write_text(JOB.replace('"hierarchical"\nsync_every = 2', '"async_sgd"'))
    words = (
        "--parallel.groups 2 --data.group_batch_size 4 --data.transform train.test_loop:hold_the_second_group"
    )
    records = train(asynchronous, tmp_path, words, n=2)
    steps = kind(records, "step")
    assert [record["step"] for record in steps] == list(range(1, TRAIN // 2 // 4 + 1))
    assert sum(record["samples"] for record in steps) == TRAIN


def test_a_model_that_does_not_fit_on_the_disk_is_one_line(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch does not raise an `OSError` for it."""

    def on_a_full_disk(state: object, target: Path) -> None:
        with full_after(2000):
            save(state, target)

    save = torch.save
    monkeypatch.setattr(torch, "save", on_a_full_disk)
    with pytest.raises(JobError) as caught:
        train(job_file, tmp_path, "--training.epochs 1", n=2)
    line = (
        rf"rank 0 of 2, saving the model: {tmp_path}/model.pt: cannot be written: its disk fails or is full "
    )
    assert re.fullmatch(line + r"\([\d.]+ \w+ free\): make space there, and pass --resume", str(caught.value))
    assert not [path for path in tmp_path.iterdir() if "model.pt" in path.name]


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 2])
def test_a_whole_run(tmp_path: Path, n: int) -> None:
    make_store(tmp_path / "small.h5", TRAIN, TEST)
    (tmp_path / "job.toml").write_text(JOB)
    done = launch(tmp_path, "train", "job.toml", "--training.epochs", "6", "--optimizer.lr", "0.5", n=n)
    assert (done.code, done.err) == (0, "")
    folder = tmp_path / "runs/job"
    names = "checkpoints curves.png job.toml metrics.jsonl model.pt run.log summary.json versions.json"
    assert sorted(path.name for path in folder.iterdir()) == names.split()
    net = mlp(36, [8])
    net.load_state_dict(torch.load(folder / "model.pt"))
    x, y = ImageDataset.collate(ImageDataset(tmp_path / "small.h5", "test").__getitems__(range(TEST)))
    scores = net(x)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["loss"] == pytest.approx(cross_entropy(scores, y).item(), rel=1e-4)
    assert summary["accuracy"] == pytest.approx((scores.argmax(1) == y).double().mean().item())
    assert summary["accuracy"] > 0.5
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (18, 6, 6 * TRAIN)
    assert sum(summary["seconds_per_phase"].values()) == pytest.approx(summary["seconds"])
    assert f"accuracy {summary['accuracy']:.4f}" in done.out
