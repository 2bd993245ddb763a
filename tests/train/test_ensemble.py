"""Tests of groups of threads that train together while groups die, return or have to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from elastic.conftest import Desk, desk, wait_for
from hpcsgd.checkpoint import Writer
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.replica_groups import NO_REPLICA_GROUPS, Absent, ReplicaGroups
from hpcsgd.core.topology import form
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.endings import Relocated
from hpcsgd.elastic.event_log import Event
from hpcsgd.elastic.rebalancing import Rebalancing
from hpcsgd.elastic.resource_budget import ResourceBudget
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError
from hpcsgd.methods import ensemble_sync, hierarchical
from hpcsgd.report.summary import of_kind, summary
from hpcsgd.train.evaluation import Score, evaluate
from hpcsgd.train.run import setting_of
from hpcsgd.train.static_run import StaticLoop
from hpcsgd.train.training_setup import TrainingSetup, assemble
from in_parallel import at_once
from train.launches import JOB, make_store
from train.replica_groups_of_threads import (
    NO_NORM,
    TRAIN,
    WORDS,
    Clock,
    Died,
    Life,
    Stops,
    World,
    assert_same,
    course,
)

__all__ = ["desk"]


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", TRAIN, 20)
    (folder / "job.toml").write_text(JOB.replace("momentum = 0", ""))
    return folder / "job.toml"


def lost(desk: Desk) -> list[Event]:
    return [event for event in desk.events() if event["event"] == "lost"]


@pytest.mark.parametrize("momentum", ["0.0", "0.9"])
def test_nobody_dies(job_file: Path, tmp_path: Path, desk: Desk, momentum: str) -> None:
    """The result has the same bits as `hierarchical` if each epoch ends with a synchronization."""
    words = ["--optimizer.arguments.momentum", momentum, "--lr_schedule.warmup_epochs", "1"]
    with desk.coordinator(2) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words)
        (one,), (other,) = at_once(lambda: world.live(0, 2), lambda: world.live(1, 2))
    assert not lost(desk)
    assert_same(one.model, other.model)
    assert (one.over, other.over) == (False, True), "the first one saves for both"
    for epoch in range(3):
        assert sorted(one.seen[epoch] + other.seen[epoch]) == list(range(TRAIN))

    def plain(world: Communicator) -> dict[str, Tensor]:
        config = load(job_file, [*WORDS, *words, "--method.name", "hierarchical", "--parallel.groups", "2"])
        parts = assemble(config, form(world, 2), "job.toml")
        checkpoints, stopping = Writer(tmp_path / "plain", parts.optimizer.topology), cast(Any, Stops())
        StaticLoop(config, parts, checkpoints, stopping, world.dup_with_thread()).train()
        return parts.model.state_dict()

    parameters = {name: value for name, value in one.model.items() if "running" not in name}
    assert_same(parameters, threads.run(2, plain)[0])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (3, 1)])
def test_groups_of_several_ranks(job_file: Path, tmp_path: Path, desk: Desk, ranks: tuple[int, int]) -> None:
    """Two or three ranks that share a batch of four train the same as one, except for rounding."""

    def train(*ranks: int) -> list[list[Life]]:
        with desk.coordinator(2) as at:
            words = ["--training.epochs", "1", *NO_NORM]
            world = World(at, job_file, tmp_path / str(ranks), words)
            return at_once(lambda: world.live(0, 2, ranks[0]), lambda: world.live(1, 2, ranks[1]))

    alone, several = train(1, 1), train(*ranks)
    assert not lost(desk)
    for lives, (life,) in zip(several, alone, strict=True):
        assert sorted(row for one in lives for row in one.seen[0]) == sorted(life.seen[0])
        for one in lives:
            for name, value in one.model.items():
                torch.testing.assert_close(value, life.model[name])


def test_one_that_dies_leaves_its_samples_to_the_others(job_file: Path, tmp_path: Path, desk: Desk) -> None:
    def die(t: int) -> None:
        if t == 7:
            raise Died

    def dying() -> None:
        with pytest.raises(Died):
            world.live(1, 3, before_step=die)

    with desk.coordinator(3) as at:
        world = World(at, job_file, tmp_path / "checkpoints")
        (one,), _, (other,) = at_once(lambda: world.live(0, 3), dying, lambda: world.live(2, 3))
    assert [event["replica_group"] for event in lost(desk)] == [1]
    assert_same(one.model, other.model)
    assert len(one.seen[0]) == len(other.seen[0]) == TRAIN // 3
    for epoch in (1, 2):
        assert sorted(one.seen[epoch] + other.seen[epoch]) == list(range(TRAIN))
    assert one.steps == other.steps == 8 + 12 + 12


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "three", "two"), [("linear", 3.0, 2.0), ("root", 3**0.5, 2**0.5)])
@pytest.mark.parametrize("follows", ["started", "alive"])
def test_the_rate_follows_the_alive_groups_from_where_samples_are_assigned(
    job_file: Path, tmp_path: Path, desk: Desk, follows: str, rule: str, three: float, two: float
) -> None:
    def die(t: int) -> None:
        if t == 7:
            raise Died

    def dying() -> None:
        with pytest.raises(Died):
            world.live(1, 3, before_step=die)

    def read(parts: TrainingSetup) -> None:
        parts.optimizer.register_step_pre_hook(lambda *_: rates.append(parts.optimizer.rates[0]))

    rates: list[float] = []
    words = ["--lr_schedule.scaling", rule, "--lr_schedule.scale_with", follows, "--optimizer.lr", "0.01"]
    with desk.coordinator(3) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words)
        at_once(lambda: world.live(0, 3, prepare=read), dying, lambda: world.live(2, 3))
    later = two if follows == "alive" else three
    assert rates == pytest.approx([0.01 * three] * 8 + [0.01 * later] * 24)


def test_the_rate_climbs_from_that_of_one_group_to_that_of_the_living(
    job_file: Path, tmp_path: Path, desk: Desk
) -> None:
    """This also holds if the rate was scaled for more groups when it was saved.

    With 4 groups an epoch has 6 steps, with 2 it has 12, and the warm-up takes ten times as many.
    """

    def read(parts: TrainingSetup) -> None:
        optimizer = parts.optimizer
        optimizer.register_step_pre_hook(lambda *_: rates.append((optimizer.t, optimizer.rates[0])))
        made.append(optimizer)

    rates, made = list[tuple[int, float]](), list[DistributedOptimizer]()
    words = ["--lr_schedule.scaling", "linear", "--lr_schedule.scale_with", "alive", "--optimizer.lr", "0.01"]
    words += ["--lr_schedule.warmup_epochs", "10", "--method.sync_every", "8"]
    with desk.coordinator(1) as at:
        World(at, job_file, tmp_path / "checkpoints", words).live(0, 4, prepare=read, stops_at=30)
    assert rates == [(t, pytest.approx(0.01)) for t in range(32)], "one is alive: there is nothing to climb"
    assert made[0].param_groups[0]["lr"] == pytest.approx(0.04), "as it stands, for all"
    rates.clear()
    with desk.coordinator(2) as at:
        again = World(at, job_file, tmp_path / "checkpoints", words)
        at_once(lambda: again.live(0, 2, prepare=read), lambda: again.live(1, 2))
    assert rates == [(t, pytest.approx(0.01 * (1 + t / 120))) for t in range(32, 32 + len(rates))]
    assert len(rates) > 12
    assert made[1].param_groups[0]["lr"] == pytest.approx(0.04)


@pytest.mark.parametrize(
    "outer",
    ["", "{name='SGD', lr=0.7, momentum=0.9, nesterov=true}", "{name='Adam', lr=0.01, betas=[0.8, 0.9]}"],
)
def test_one_that_returns(job_file: Path, tmp_path: Path, desk: Desk, outer: str) -> None:
    """A returning group continues its share, skips what it missed, and shares the next epoch.

    It has no state of an outer optimizer; it gets that of the other groups.
    """
    dead = threading.Event()

    def die(t: int) -> None:
        if t == 4:
            raise Died

    def dies_and_returns() -> Life:
        with pytest.raises(Died):
            world.live(1, 2, before_step=die)
        dead.set()
        (life,) = world.live(1, 2)
        return life

    def wait(t: int) -> None:
        if t == 5:
            assert dead.wait(100)
        if t == 6:  # the synchronization before was without it
            wait_for(lambda: 1 in at.membership.expected)

    with desk.coordinator(2) as at:
        words = ["--method.sync_every", "1", *(["--method.outer", outer] if outer else [])]
        world = World(at, job_file, tmp_path / "checkpoints", words)
        (stayed,), returned = at_once(lambda: world.live(0, 2, before_step=wait), dies_and_returns)
    assert_same(stayed.model, returned.model)
    first = stayed.seen[0] + returned.seen[0]
    assert len(set(first)) == len(first), "nothing comes twice"
    assert 0 < len(returned.seen[0]) < TRAIN // 2 - 4 * 4
    for epoch in (1, 2):
        assert sorted(stayed.seen[epoch] + returned.seen[epoch]) == list(range(TRAIN))


def test_the_last_group_gets_the_samples_of_one_that_died_before_a_round(
    job_file: Path, tmp_path: Path, desk: Desk
) -> None:
    begun = threading.Event()

    def die(t: int) -> None:
        begun.set()
        wait_for(lambda: 1 in at.membership.expected)
        raise Died

    def dying() -> None:
        with pytest.raises(Died):
            world.live(0, 2, before_step=die)

    def late() -> Life:
        assert begun.wait(100)
        return world.live(1, 2, stops_at=200)[0]  # asked in each step, and in each round without samples

    with desk.coordinator(1) as at:
        world = World(at, job_file, tmp_path / "checkpoints")
        _, last = at_once(dying, late)
    assert (last.reason, at.register.sharing) == (None, (1,))
    assert [sorted(last.seen[epoch]) for epoch in range(3)] == [list(range(TRAIN))] * 3


def test_a_share_is_cut_anew_where_other_groups_have_the_same_samples(
    job_file: Path, tmp_path: Path, desk: Desk
) -> None:
    """The round at step 3 says so, after which an epoch of 24 steps has 12."""

    def divide(t: int) -> None:
        if t == 1:
            at.membership.register = replace(at.register, sharing=(0, 1))

    with desk.coordinator(1) as at:
        world = World(at, job_file, tmp_path / "checkpoints", ["--training.epochs", "1"])
        (life,) = world.live(0, 2, before_step=divide)
    assert synced_after(life) == [3, 6, 9, 12]


OUTER = ["--method.outer", "{name='SGD', lr=0.7, momentum=0.9, nesterov=true}"]
RISING = ["--method.outer_schedule", "{name='piecewise', lr=[[0, 0.2], [1, 1.0]]}"]


@pytest.mark.parametrize("outer", [[], [*OUTER, *RISING], [*OUTER, "--method.num_fragments", "2"]])
def test_who_comes_new_looks_on_until_samples_are_assigned(
    job_file: Path, tmp_path: Path, desk: Desk, outer: list[str]
) -> None:
    begun = threading.Event()

    def wait(t: int) -> None:
        begun.set()
        if t == 2:
            wait_for(lambda: 1 in at.membership.expected)

    def late() -> Life:
        assert begun.wait(100)
        return world.live(1, 2)[0]

    with desk.coordinator(1) as at:
        every = ["--method.sync_every", "2" if "--method.num_fragments" in outer else "1"]
        more = [*every, "--training.epochs", "2", *outer]
        world = World(at, job_file, tmp_path / "checkpoints", more)
        (first,), second = at_once(lambda: world.live(0, 2, before_step=wait), late)
    assert_same(first.model, second.model)
    assert list(second.seen) == [1]
    assert sorted(first.seen[0]) == list(range(TRAIN))
    assert sorted(first.seen[1] + second.seen[1]) == list(range(TRAIN))


@pytest.mark.slow
@pytest.mark.parametrize("per", ["epoch", "step"])
def test_all_stop_where_one_has_to_and_go_on_later(
    job_file: Path, tmp_path: Path, desk: Desk, per: str
) -> None:
    """The groups resume with another number of groups; no sample is seen twice."""
    schedule = [
        "--lr_schedule.name",
        "StepLR",
        "--lr_schedule.arguments.step_size",
        "1",
        "--lr_schedule.interval",
        per,
    ]
    with desk.coordinator(2) as at:
        world = World(at, job_file, tmp_path / "checkpoints", schedule)
        (one,), (other,) = at_once(lambda: world.live(0, 2), lambda: world.live(1, 2, stops_at=15))
    assert (one.reason, other.reason) == ("another replica group has to stop", "it is time")
    assert one.steps == other.steps == 18, "at the next meeting"
    (desk.folder / "register.json").unlink(missing_ok=True)
    with desk.coordinator(1) as at:
        again = World(at, job_file, tmp_path / "checkpoints", schedule)
        (rest,) = again.live(0, 1, ranks=1)
    assert synced_after(rest) == list(range(3, 55, 3)), "the one that it begins with was recorded before"
    assert sorted(one.seen[1] + other.seen[1] + rest.seen[1]) == list(range(TRAIN))
    assert sorted(rest.seen[2]) == list(range(TRAIN))


def test_an_epoch_of_overlapping_shares_goes_on_with_fewer_groups(
    job_file: Path, tmp_path: Path, desk: Desk
) -> None:
    """Each of two groups has 72 of 96 samples; one alone has all but as many as it had in 12 steps."""
    words = ["--data.overlap_share", "0.75", "--training.epochs", "1"]
    with desk.coordinator(2) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words)
        (one,), _ = at_once(lambda: world.live(0, 2), lambda: world.live(1, 2, stops_at=10))
    with desk.coordinator(1) as at:
        (rest,) = World(at, job_file, tmp_path / "checkpoints", words).live(0, 2)
    assert (len(one.seen[0]), len(rest.seen[0])) == (12 * 4, TRAIN - 12 * 4)


def last_evaluation(monkeypatch: pytest.MonkeyPatch, begun: Callable[[], None]) -> None:
    """Call `begun` when the group 0 begins to evaluate after the last of 12 steps."""

    def evaluated(parts: TrainingSetup) -> Score:
        if (parts.optimizer.topology.replica_groups.index, parts.optimizer.t) == (0, 12):
            begun()
        return evaluate(parts)

    monkeypatch.setattr("hpcsgd.train.loop.evaluate", evaluated)


ONE_EPOCH = ["--training.epochs", "1"]


def test_no_round_begins_while_the_first_group_evaluates_and_saves(
    job_file: Path, tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round would end without that group, where the others are a quorum."""
    waiting, wait = threading.Event(), ElasticAverage.wait

    def waits(average: ElasticAverage) -> None:
        waiting.set()
        wait(average)

    def begun() -> None:
        assert waiting.wait(60)
        assert not at._arrivals.have_begun(at.register)

    monkeypatch.setattr(ElasticAverage, "wait", waits)
    last_evaluation(monkeypatch, begun)
    with desk.coordinator(2, quorum=1, grace=0.1) as at:
        world = World(at, job_file, tmp_path / "checkpoints", ONE_EPOCH)
        (one,), (other,) = at_once(lambda: world.live(0, 2), lambda: world.live(1, 2))
    assert [len(of_kind(life.records, "eval")) for life in (one, other)] == [1, 0]
    assert (one.over, other.over) == (False, True)


def test_if_the_first_group_dies_while_it_evaluates_the_next_one_evaluates_and_saves(
    job_file: Path, tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise Died

    def dying() -> None:
        with pytest.raises(Died):
            world.live(0, 2)

    last_evaluation(monkeypatch, die)
    with desk.coordinator(2) as at:
        world = World(at, job_file, tmp_path / "checkpoints", ONE_EPOCH)
        _, (last,) = at_once(dying, lambda: world.live(1, 2))
    assert [record["step"] for record in of_kind(last.records, "eval")] == [12]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step*")] == ["step-00000012"]


def test_groups_that_are_killed_in_an_evaluation_do_not_lose_the_epoch(
    job_file: Path, tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups that are started again make up for the evaluation, once."""
    folder = tmp_path / "checkpoints"
    names = ["step-00000012"]

    def saved() -> bool:
        return [path.name for path in folder.glob("step*")] == names

    def killed() -> None:
        wait_for(saved, 10)
        raise Died

    def dies_after(t: int) -> None:
        if t == 12:
            raise Died

    def first() -> None:
        with pytest.raises(Died):
            world.live(0, 2)

    def second() -> None:
        with pytest.raises(Died):
            world.live(1, 2, before_step=dies_after)

    with monkeypatch.context() as patch, desk.coordinator(2) as at:
        last_evaluation(patch, killed)
        world = World(at, job_file, folder)
        at_once(first, second)
    with desk.coordinator(2) as at:
        world = World(at, job_file, folder)
        (one,), (other,) = at_once(lambda: world.live(0, 2), lambda: world.live(1, 2))
    assert [record["step"] for record in of_kind(one.records, "eval")] == [12, 24, 36]
    assert not of_kind(other.records, "eval")
    assert one.steps == other.steps == 24, "the first epoch was not trained again"


def test_synchronizations_at_the_ends_of_epochs_are_recorded(
    job_file: Path, tmp_path: Path, desk: Desk
) -> None:
    """Epochs have 12 steps; in the second one there is also a scheduled synchronization."""
    with desk.coordinator(2) as at:
        world = World(at, job_file, tmp_path / "checkpoints", ["--method.sync_every", "8"])
        (one,), (other,) = at_once(lambda: world.live(0, 2), lambda: world.live(1, 2))
    for life in (one, other):
        assert synced_after(life) == [8, 12, 16, 24, 32, 36]
        numbers = summary(life.records)
        assert (numbers["model_averages"], numbers["lssr"]) == (6, 1 - 6 / 36)


def synced_after(life: Life) -> list[int]:
    """Return the steps after which the group synchronized."""
    return [record["step"] for record in of_kind(life.records, "sync")]


def test_groups_synchronize_by_ensemble_alone() -> None:
    def wrap(world: Communicator, method: Any, peers: ReplicaGroups) -> None:
        net = torch.nn.Linear(2, 1)
        DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net, replace(form(world), replica_groups=peers), method
        )

    with pytest.raises(UserError, match="start it with `hpcsgd launch`"):
        threads.run(1, lambda world: wrap(world, ensemble_sync(sync_every=2), NO_REPLICA_GROUPS))
    with pytest.raises(UserError, match="only method ensemble_sync can average"):
        threads.run(1, lambda world: wrap(world, hierarchical(sync_every=2), Absent(count=2)))


def test_an_group_does_not_train_as_if_it_were_alone(job_file: Path) -> None:
    def one(world: Communicator) -> None:
        setting_of(load(job_file), replace(form(world), replica_groups=Absent(count=2)), None)

    with pytest.raises(AssertionError):
        threads.run(1, one)


@pytest.mark.slow
@pytest.mark.parametrize("K", [1, 2])
def test_the_slow_group_is_given_more(
    job_file: Path, tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch, K: int
) -> None:
    """The fast group gets fewer samples per pass, whether it has one or two ranks.

    A pass takes the same time for any number of samples, as on an accelerator, but five times as long on the
    slow group. Synchronizations take longest, and count for neither group.
    """
    clock, seconds = Clock(), list[dict[int, float]]()
    attempt, propose = ElasticAverage._attempt, Rebalancing.propose

    def attempted(*given: Any) -> bool:
        clock.wait(100)
        return attempt(*given)

    def proposed(*given: Any) -> dict[int, int] | None:
        seconds.append(given[1])
        return propose(*given)

    monkeypatch.setattr("hpcsgd.train.elastic_run.time", clock)
    monkeypatch.setattr("hpcsgd.elastic.elastic_average.time", clock)
    monkeypatch.setattr(ElasticAverage, "_attempt", attempted)
    monkeypatch.setattr(Rebalancing, "propose", proposed)

    def passes_of(seconds: float) -> Callable[[TrainingSetup], None]:
        def prepare(parts: TrainingSetup) -> None:
            parts.model.register_forward_pre_hook(lambda *_: clock.wait(seconds))

        return prepare

    words = ["--rebalance.resource", "samples", "--rebalance.total", "8", "--data.group_batch_size", "24"]
    words += ["--training.epochs", "4", *NO_NORM]
    allots = ResourceBudget("samples", 8, min_gain=0.1, cost=0, epochs=4)
    with desk.coordinator(2, budget=allots) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words)
        some, (other,) = at_once(
            lambda: world.live(0, 2, K, prepare=passes_of(0.02)),
            lambda: world.live(1, 2, prepare=passes_of(0.1)),
        )
    in_passes = desk.events()
    with desk.coordinator(2) as at:
        plain = World(at, job_file, tmp_path / "plain", words)
        whole, (half,) = at_once(lambda: plain.live(0, 2, K), lambda: plain.live(1, 2))
    assert course(in_passes) == course(desk.events()[len(in_passes) :])
    assert [life.seen for life in [*some, other]] == [life.seen for life in [*whole, half]]
    assert [event["units"] for event in in_passes if "units" in event] == [{0: 4, 1: 4}, {0: 1, 1: 7}]
    # An epoch has two steps of 24 samples. First each group makes 6 passes of 4 samples per step.
    # Then group 0 makes 24 passes of 1 sample (12 on each of 2 ranks), and group 1 makes 4 passes of 7.
    epochs = [{}, {0: 2 * 6 * 0.02, 1: 2 * 6 * 0.1}, *[{0: 2 * 24 // K * 0.02, 1: 2 * 4 * 0.1}] * 3]
    assert seconds == [pytest.approx(epoch) for epoch in epochs]
    assert_same(some[0].model, other.model)
    for name, value in some[0].model.items():
        torch.testing.assert_close(value, whole[0].model[name])


@pytest.mark.slow
def test_an_group_that_is_given_other_ranks_comes_back_with_them(
    job_file: Path, tmp_path: Path, desk: Desk
) -> None:
    """The other groups wait for it, and no sample of its share is lost."""
    words = ["--rebalance.resource", "ranks", "--training.epochs", "2", *NO_NORM]

    def lives(replica_group: int, ranks: int, work: float) -> list[Life]:
        went: list[Life] = []
        while True:
            try:
                world.live(replica_group, 2, ranks, work=work, went=went)
                return went
            except Relocated:
                ranks = dict(at.register.units)[replica_group]

    allots = ResourceBudget("ranks", 1, min_gain=0.1, cost=0, epochs=2)
    with desk.coordinator(2, budget=allots) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words)
        fast, slow = at_once(lambda: lives(0, 2, 0.04), lambda: lives(1, 2, 0.3))
    assert dict(at.register.units) == {0: 1, 1: 3}
    assert_same(fast[-1].model, slow[-1].model)
    assert not lost(desk)
    for epoch in (0, 1):
        assert sorted(row for life in (*fast, *slow) for row in life.seen.get(epoch, [])) == list(
            range(TRAIN)
        )


def test_a_group_that_is_given_other_ranks_is_not_lost(job_file: Path, tmp_path: Path, desk: Desk) -> None:
    """It reports that it leaves to return, and the other groups wait for it."""
    words = ["--rebalance.resource", "ranks", "--training.epochs", "2", "--data.group_batch_size", "24"]
    allots = ResourceBudget("ranks", 1, min_gain=0.1, cost=0, epochs=2)

    def lives(replica_group: int, ranks: int, work: float) -> None:
        try:
            world.live(replica_group, 2, ranks, work=work)
        except Relocated:
            world.live(replica_group, 2, dict(at.register.units)[replica_group], work=work)

    with desk.coordinator(2, budget=allots) as at:
        world = World(at, job_file, tmp_path / "checkpoints", [*words, *NO_NORM])
        at_once(lambda: lives(0, 2, 0.04), lambda: lives(1, 1, 0.3))
    assert dict(at.register.units) == {0: 1, 1: 2}
    assert not lost(desk)


@pytest.mark.slow
def test_a_group_that_had_no_samples_is_given_other_ranks_at_the_start_of_an_epoch(
    job_file: Path, tmp_path: Path, desk: Desk
) -> None:
    """It joins in epoch 0, and both groups move before epoch 1."""
    begun = threading.Event()
    words = ["--rebalance.resource", "ranks", "--training.epochs", "2", *NO_NORM]

    def wait(t: int) -> None:
        begun.set()
        if t == 2:
            wait_for(lambda: 1 in at.membership.expected)

    def lives(replica_group: int, work: float) -> list[Life]:
        went, ranks = list[Life](), 2
        while True:
            try:
                world.live(replica_group, 2, ranks, work=work, went=went, before_step=wait)
                return went
            except Relocated:
                ranks = dict(at.register.units)[replica_group]

    def late() -> list[Life]:
        assert begun.wait(100)
        return lives(1, 0.3)

    allots = ResourceBudget("ranks", 1, min_gain=0.1, cost=0, epochs=2)
    with desk.coordinator(1, budget=allots) as at:
        world = World(at, job_file, tmp_path / "checkpoints", words)
        fast, slow = at_once(lambda: lives(0, 0.04), late)
    assert (len(fast), len(slow)) == (2 + 1, 2 + 3)
    assert_same(fast[-1].model, slow[-1].model)
    assert not any(life.seen for life in slow[:2])
    assert sorted(row for life in (*fast, *slow) for row in life.seen.get(1, [])) == list(range(TRAIN))
