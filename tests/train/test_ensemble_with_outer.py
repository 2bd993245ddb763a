"""Tests of groups of threads with an outer optimizer: no group dies, and all resume later."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from elastic.conftest import Desk, desk, wait_for
from hpcsgd.checkpoint import Writer
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.parts.averagers import OUTER_STATE, OuterElasticFragments, OuterElasticMean
from hpcsgd.train.static_run import StaticLoop
from hpcsgd.train.training_setup import TrainingSetup, assemble
from in_parallel import at_once
from train.replica_groups_of_threads import NO_NORM, WORDS, Stops, World, assert_same
from train.test_ensemble import job_file

__all__ = ["desk", "job_file"]

SGD = "{name='SGD', lr=0.7, momentum=0.9, nesterov=true}"
ADAM = "{name='Adam', lr=0.01, betas=[0.8, 0.9]}"


def words(outer: str, *more: str) -> list[str]:
    return ["--method.outer", outer, *more]


@pytest.mark.parametrize("outer", [SGD, ADAM])
def test_nobody_dies(job_file: Path, tmp_path: Path, desk: Desk, outer: str) -> None:
    """The result has the same bits as `diloco` if each epoch ends with a synchronization."""
    with desk.coordinator(2) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words(outer, *NO_NORM))
        (one,), (other,) = at_once(lambda: world.live(0, 2), lambda: world.live(1, 2))
    assert_same(one.model, other.model)

    def plain(world: Communicator) -> dict[str, Tensor]:
        given = [*WORDS, *words(outer, *NO_NORM), "--method.name", "diloco", "--parallel.groups", "2"]
        config = load(job_file, given)
        parts = assemble(config, form(world, 2), "job.toml")
        checkpoints, stopping = Writer(tmp_path / "plain", parts.optimizer.topology), cast(Any, Stops())
        StaticLoop(config, parts, checkpoints, stopping, world.dup_with_thread()).train()
        return parts.model.state_dict()

    assert_same(one.model, threads.run(2, plain)[0])


FRAGMENTS = ["--method.sync_every", "6", "--method.num_fragments", "3"]
"""A synchronization of one fragment after every two steps."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 1), (1, 3)])
def test_groups_end_with_one_model_if_they_synchronize_fragments(
    job_file: Path, tmp_path: Path, desk: Desk, ranks: tuple[int, int]
) -> None:
    """Where an epoch ends or a checkpoint is saved, all fragments are synchronized. Epochs have 12 steps."""

    more = [*FRAGMENTS, *NO_NORM, "--training.checkpoint_every_steps", "8"]
    with desk.coordinator(2) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words(SGD, *more))
        (one, *_), (other, *_) = at_once(
            lambda: world.live(0, 2, ranks[0]), lambda: world.live(1, 2, ranks[1])
        )
    assert_same(one.model, other.model)
    commits = [event["t"] for event in desk.events() if event["event"] == "commit"]
    assert commits == [0, *range(2, 37, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], FRAGMENTS])
def test_all_go_on_later(job_file: Path, tmp_path: Path, desk: Desk, more: list[str]) -> None:
    """The groups resume with θ and the outer momentum of the checkpoint."""

    def outer(parts: TrainingSetup) -> dict[str, Tensor]:
        averager = parts.optimizer.method.averager
        assert isinstance(averager, OuterElasticMean | OuterElasticFragments)
        state = averager.state_dict().sharded
        return {
            name: torch.cat([x.clone() for x in state[name]])
            for name in ("theta", f"{OUTER_STATE}momentum_buffer")
        }

    def keep(parts: TrainingSetup) -> None:
        kept.append(parts)

    def look(t: int) -> None:
        if not begun:
            begun.append(outer(kept[-1]))

    kept: list[TrainingSetup] = []
    begun: list[dict[str, Tensor]] = []
    with desk.coordinator(1) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words(SGD, *more))
        world.live(0, 1, 1, stops_at=15, prepare=keep)
    saved = outer(kept[-1])
    (desk.folder / "register.json").unlink(missing_ok=True)
    with desk.coordinator(1) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words(SGD, *more))
        world.live(0, 1, 2, prepare=keep, before_step=look)
    assert saved[f"{OUTER_STATE}momentum_buffer"].abs().sum() > 0
    for name, value in saved.items():
        assert torch.equal(value, begun[0][name][: value.numel()]), name


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_late_group_does_not_stand_for_all(
    job_file: Path, tmp_path: Path, desk: Desk, fragments: int
) -> None:
    """Its work counts at the end of an epoch. There the other group evaluates, which is at that step."""

    def late(t: int) -> None:
        if t == 9:
            rounds = at.register.rounds
            wait_for(lambda: at._arrivals._enough_since is not None)
            assert at._arrivals._enough_since is not None
            at._arrivals._enough_since -= 601
            wait_for(lambda: at.register.rounds > rounds)

    def wait(t: int) -> None:
        if t == 10:
            wait_for(lambda: 0 in at.membership.expected)

    how = ["--method.quorum", "1", "--method.grace_s", "600", "--method.late_rounds", "2"]
    how += ["--method.sync_every", str(fragments), "--method.num_fragments", str(fragments), *NO_NORM]
    with desk.coordinator(2, quorum=1, grace=600, late_rounds=2) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words(SGD, *how))
        (one,), (other,) = at_once(
            lambda: world.live(0, 2, before_step=late), lambda: world.live(1, 2, before_step=wait)
        )
    assert_same(one.model, other.model)
    commits = [event for event in desk.events() if event["event"] == "commit"]
    counted = {event["t"]: event["counted"] for event in commits}
    assert [counted[t] for t in (9, 10, 11, 12, 13)] == [[0, 1], [1], [1], [0, 1], [0, 1]]
    evaluated = [
        [record["epoch"] for record in life.records if record["kind"] == "eval"] for life in (one, other)
    ]
    assert evaluated == [[2, 3], [1]]


@pytest.mark.parametrize("outer", [[], ["--method.outer", SGD]])
def test_guarded_groups_go_on_later(job_file: Path, tmp_path: Path, desk: Desk, outer: list[str]) -> None:
    guard = [*outer, "--method.guard", "{name='pseudo_gradient_penalty'}"]
    with desk.coordinator(1) as at:
        World(at, job_file, tmp_path / "checkpoints", guard).live(0, 1, stops_at=15)
    (desk.folder / "register.json").unlink(missing_ok=True)
    with desk.coordinator(1) as at:
        (rest,) = World(at, job_file, tmp_path / "checkpoints", guard).live(0, 1)
    assert rest.reason is None
    assert rest.steps > 0
