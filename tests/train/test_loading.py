from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hpcsgd.cluster.batch import Allocation, check_training
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.replica_groups import Absent
from hpcsgd.core.topology import form
from hpcsgd.data import (
    AsRank,
    ByLabel,
    DefDP,
    Dirichlet,
    Injection,
    Overlapping,
    Partition,
    Sampler,
    SelDP,
)
from hpcsgd.errors import JobError, UserError
from hpcsgd.performance.probing.job_file import plan_of
from hpcsgd.train.loading import make_partition
from hpcsgd.train.training_setup import TrainingSetup, assemble
from train import small
from train.interruptions import assert_interruptions_change_nothing, train, without_pictures
from train.launches import JOB, launch, make_store

TRAIN = 96
SAMPLE = 36 * 4 + 8  # bytes: an image of 6 × 6 in float32, its label in int64
INJECTION = "--data.injection {alpha=0.5,beta=0.5}"


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", TRAIN)
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


def parts_of(job_file: Path, words: str, n: int, groups: int) -> list[TrainingSetup]:
    def one(world: Communicator) -> TrainingSetup:
        return assemble(load(job_file, words.split()), form(world, groups), "job.toml")

    return threads.run(n, one)


PARTITIONS: dict[str, Partition | None] = {
    "": None,
    "--data.overlap_share 0.75": Overlapping(0.75),
    '--data.partition {name="overlapping",share=0.75}': Overlapping(0.75),
    '--data.partition {name="seldp"}': SelDP(),
    "--data.partition.name defdp": DefDP(),
    '--data.partition {name="by_label"}': ByLabel(),
    '--data.partition {name="dirichlet",alpha=2}': Dirichlet(2),
    "--data.partition.name train.test_loading:mine": SelDP(),
}


def mine() -> Partition:
    return SelDP()


@pytest.mark.parametrize(("words", "partition"), PARTITIONS.items())
def test_names_of_a_job_file(job_file: Path, words: str, partition: Partition | None) -> None:
    """Data is divided among groups by the labels in the dataset file, with the seed of the job."""
    assert make_partition(load(job_file, words.split()).data) == partition
    made = parts_of(job_file, f"{words} --seed 5", 4, 2)
    labels = torch.arange(TRAIN) % 10
    for rank, parts in enumerate(made):
        seat = AsRank(rank, 4, group_size=2)
        expected = Sampler(TRAIN, seat, seed=5, partition=partition, labels=labels.tolist())
        assert list(parts.sampler) == list(expected)
        assert parts.steps_per_epoch == -(-len(expected) // 8)


def nothing() -> None:
    return None


class OfAUser:
    """A partition that a user wrote."""

    allows_elastic_groups: ClassVar[bool] = True

    def __init__(self) -> None:
        inner = Overlapping(0.75)
        self.require, self.length, self.assign = inner.require, inner.length, inner.assign


REFUSED = {
    "--data.partition.name seldq": "[data] partition: no 'seldq'; did you mean 'seldp'? Allowed: by_label, ",
    "--data.partition.alpha 3": "[data] partition: name = None: expected one of by_label, defdp, dirichlet, ",
    '--data.partition {name="dirichlet"}': "[data] partition: Dirichlet needs 'alpha'; given: none",
    '--data.partition {name="dirichlet",alphas=1}': "has no argument 'alphas'; did you mean 'alpha'",
    '--data.partition {name="dirichlet",alpha="x"}': "Dirichlet: alpha = 'x': expected float",
    '--data.partition {name="dirichlet",alpha=0}': "[data] partition: alpha = 0: must be a number > 0",
    '--data.partition {name="seldp"} --data.overlap_share 1': (
        "[data] overlap_share = 1.0: give overlap_share or partition"
    ),
    "--data.overlap_share 0.4": "[data] partition: share 0.4 of the samples: each of 2 groups needs 1/P to 1",
    "--data.partition.name train.test_loading:nothing": "returned NoneType, expected a Partition",
    "--data.injection {alpha=0.5}": "[data] injection: Injection needs 'beta'; given: alpha",
    "--data.injection {alpha=0.5,beta=1.5}": "[data] injection: beta = 1.5: must be",
    "--data.injection {alpha=0.5,bata=1}": "Injection has no argument 'bata'; did you mean 'beta'",
    "--data.injection {alpha=1,beta=1} --data.group_batch_size 2": (
        "leaves none of the 2 samples of a rank's batch"
    ),
    "--data.injection {alpha=0.5,beta=1} --data.group_batch_size 80": "a rank has 48 samples an epoch",
}


@pytest.mark.parametrize(("words", "message"), REFUSED.items())
def test_what_is_refused_and_why(job_file: Path, words: str, message: str) -> None:
    """A run refuses it, and so does the check before a batch job gets nodes."""
    with pytest.raises(JobError) as caught:
        parts_of(job_file, words, 2, 2)
    with pytest.raises(UserError) as checked:
        check_training(job_file, [*words.split(), "--parallel.groups", "2"], Allocation(ranks_per_node=2))
    for error in (caught, checked):
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_what_fits_two_groups_is_checked_as_that(job_file: Path) -> None:
    for words in ("--data.overlap_share 0.75", "--data.partition.name by_label", INJECTION):
        check_training(job_file, [*words.split(), "--parallel.groups", "2"], Allocation(ranks_per_node=2))


@pytest.mark.parametrize("key", ["--data.overlap_share 0.75", "--data.partition.name seldp", INJECTION])
def test_the_probe_has_virtual_groups_that_share_alike(job_file: Path, key: str) -> None:
    message = r"\[data\] (overlap_share|partition|injection): the probe assigns all samples"
    with pytest.raises(UserError, match=message):
        plan_of(load(job_file, key.split()), job_file, None, 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--data.overlap_share 0.75", None),
        (
            "--data.partition.name seldp",
            r"\[data\] partition: SelDP\(\) needs a fixed number of groups, but .* return: use overlapping$",
        ),
        ("--data.partition.name train.test_loading:OfAUser", None),
        (INJECTION, r"\[data\] injection: groups that `hpcsgd launch` starts do not share"),
    ],
)
def test_groups_know_shares_alone(job_file: Path, words: str, told: str | None) -> None:

    def one(world: Communicator) -> Sampler:
        topology = replace(form(world), replica_groups=Absent(1, 3))
        return assemble(
            load(job_file, [*words.split(), "--method.name", "ensemble_sync"]), topology, "job.toml"
        ).sampler

    if told is not None:
        with pytest.raises(JobError, match=told):
            threads.run(1, one)
    else:
        (sampler,) = threads.run(1, one)
        assert list(sampler) == list(Sampler(TRAIN, AsRank(1, 3), seed=1, partition=Overlapping(0.75)))


def test_groups_share_samples_in_training(job_file: Path, tmp_path: Path) -> None:
    small.seen.clear()
    words = f"{INJECTION} --parallel.groups 4 --data.group_batch_size 8 --data.transform train.small:noted"
    train(job_file, tmp_path, *words.split(), n=4)
    own, s, S = Injection(0.5, 0.5).portions(8, 4)
    assert (own, s, S) == (4, 2, 2)
    steps = [r for r in outcome_records(tmp_path) if r["kind"] == "step"]
    assert [r["samples"] for r in steps] == [4 * 8] * (TRAIN // 4 // (own + s))
    for step, record in enumerate(steps):
        sharers = Injection(0.5, 0.5).sharers(4, 1, 0, step)
        batches = [small.seen[rank][step] for rank in range(4)]
        for g, x in enumerate(batches):
            tails = [batches[h][own : own + s] for h in sharers if h != g]
            assert torch.equal(x[-len(tails) * s :], torch.cat(tails))
            assert len(x) == 8
        assert record["phase_bytes"].get("injection", 0) == (0 in sharers) * 3 * s * SAMPLE
    waited = sum(r["phase_seconds"]["injection"] for r in steps[1:])
    assert waited > sum(r["phase_seconds"]["data"] for r in steps[1:]), "not told as waiting for the loader"


def outcome_records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


TRAINED = [words for words in PARTITIONS if words and "share=" not in words and ":mine" not in words]


@pytest.mark.slow
@pytest.mark.parametrize("words", [*TRAINED, INJECTION, f"--data.partition.name by_label {INJECTION}"])
def test_a_run_killed_in_mid_epoch_ends_as_if_it_had_not_been(
    job_file: Path, tmp_path: Path, words: str
) -> None:
    options = (
        f"{words} --parallel.groups 2 --data.group_batch_size 8 --training.epochs 2 "
        "--training.checkpoint_every_steps 2 --model.name train.small:steady "
        "--model.arguments {inputs=36} --data.num_workers 0"
    ).split()
    assert_interruptions_change_nothing(job_file, tmp_path, *options)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "groups"), [(2, 2), (4, 4), (3, 1)])
def test_resumed_on_other_numbers_of_ranks(job_file: Path, tmp_path: Path, n: int, groups: int) -> None:
    words = (
        f"--data.partition.name seldp {INJECTION} --data.group_batch_size 12 "
        "--training.checkpoint_every_steps 2 --model.name train.small:steady --model.arguments {inputs=36}"
    )
    train(job_file, tmp_path, *words.split(), "--parallel.groups", "2", n=4, at=5)
    train(job_file, tmp_path, *words.split(), "--parallel.groups", str(groups), n=n, resume=True)
    assert (tmp_path / "model.pt").exists()


def test_one_group_has_nobody_to_share_with(job_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    (plain,) = parts_of(job_file, "", 1, 1)
    assert caplog.messages == []
    (parts,) = parts_of(job_file, INJECTION, 1, 1)
    assert caplog.messages == ["[data] injection: ignored, because there is only one group"]
    assert parts.injected is None
    assert list(parts.batches) == list(plain.batches)


@pytest.mark.slow
def test_by_processes_with_workers(job_file: Path) -> None:
    words = f"--data.partition.name by_label {INJECTION} --parallel.groups 2 --data.num_workers 1".split()
    done = launch(job_file.parent, "train", "job.toml", *words, "--run.output_dir", "by-processes", n=2)
    assert (done.code, done.err) == (0, "")
    checked = launch(job_file.parent, "train", "job.toml", "--data.partition.name", "bylabel")
    assert checked.messages == [
        "hpcsgd: job.toml: [data] partition: no 'bylabel'; did you mean 'by_label'? Allowed: by_label, "
        'defdp, dirichlet, overlapping, seldp, or "package.module:function"'
    ]


def test_labels_are_those_of_the_store(job_file: Path) -> None:
    (parts, *_) = parts_of(job_file, "--data.partition.name by_label", 2, 2)
    labels = [parts.loader.dataset[row][1].item() for row in parts.sampler]
    assert set(labels) == {0, 1, 2, 3, 4}
