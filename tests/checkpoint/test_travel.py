"""The state of every method on another P × K: each part follows its declared rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint.test_snapshot import load, save
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.state import State
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, bsp, diloco, hierarchical, switch
from hpcsgd.methods.diloco import OuterOptimizer
from hpcsgd.parts.averagers import MeanOfAll, PseudoGradientPenalty, RadialDirectional
from hpcsgd.parts.averagers.outer_step import NESTEROV
from hpcsgd.parts.grad_reduces import AllReduce, MomentumCorrection, Sparse
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.sparsifiers import Deft, ExDyna, MiCRO, SIDCo, TopK
from methods.table import EVERY
from trainings import METHODS, PLAIN, WAITING_FOR_NOBODY, Training

SAVED = 4
MORE: dict[str, Callable[[], Method]] = {
    "guarded": lambda: diloco(2, guard=PseudoGradientPenalty()),
    "radial-directional": lambda: diloco(2, merge=RadialDirectional()),
    "sparse local SGD": lambda: hierarchical(EVERY, Sparse(SIDCo(0.3))),
    "sparse local SGD in blocks": lambda: hierarchical(EVERY, Sparse(ExDyna(0.3))),
    "sparse local SGD in equal parts": lambda: hierarchical(EVERY, Sparse(MiCRO(0.3))),
    "sparse bsp": lambda: bsp(Sparse(TopK(0.2), feedback=MomentumCorrection(0.9))),
    "from sparse to sparse": lambda: switch(
        bsp(Sparse(Deft(0.2))), hierarchical(2, Sparse(TopK(0.1))), at=SAVED + 1
    ),
    "outer steps of whole models": lambda: Method(
        AllReduce(), Every(2), OuterOptimizer(MeanOfAll(), NESTEROV, lambda _: None)
    ),
}
ALL = METHODS | PLAIN | WAITING_FOR_NOBODY | MORE
EACH_RULE = {"ad_psgd", "adacomm", "diloco", "selsync", "sgp", "sparse local SGD"}
SHAPES = [(4, 1), (1, 4), (1, 1), (8, 1)]
WAYS = [((2, 2), now) for now in SHAPES] + [(before, (2, 2)) for before in SHAPES]
LONG = [way for way in WAYS if way not in {((2, 2), (4, 1)), ((1, 4), (2, 2))}]

Vectors = dict[tuple[str, str, str], list[tuple[int, Tensor]]]
"""By role, name and parameter: the shard ranges as pairs of first element and values."""


def trained(world: Communicator, P: int, method: str, seed: int = 0) -> Training:
    return Training(form(world, groups=P), "plain", ALL[method], seed=seed)


def some_steps(training: Training) -> None:
    training.steps(SAVED - 1)
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5  # as a learning-rate scheduler does
    training.steps(1)


def shards_of(training: Training, states: Mapping[str, State]) -> Vectors:
    """Return this rank's shards of every vector, by parameter."""
    found: Vectors = {}
    for role, state in states.items():
        for name, vectors in state.sharded.items():
            for bucket, vector in zip(training.optimizer.buckets, vectors, strict=True):
                for piece in bucket.ranges:
                    whole = vector.numel() == bucket.w.numel()
                    at = piece.slot.start + piece.start if whole else piece.offset
                    values = vector[at : at + piece.stop - piece.start].clone()
                    found.setdefault((role, name, piece.slot.name), []).append((piece.start, values))
    return found


def saved_by(P: int, K: int, method: str, folder: Path) -> list[tuple[dict[str, State], Vectors]]:
    def one(world: Communicator) -> tuple[dict[str, State], Vectors]:
        training = trained(world, P, method)
        some_steps(training)
        save(training, folder)
        states = training.optimizer.method.state_dict()
        return states, shards_of(training, states)

    return threads.run(P * K, one)


def assembled(ranks: list[Vectors]) -> dict[tuple[str, str, str], Tensor]:
    """Return the whole vectors of one group, joined from the shards of its ranks."""
    joined: Vectors = {}
    for found in ranks:
        for key, pieces in found.items():
            joined.setdefault(key, []).extend(pieces)
    return {
        key: torch.cat([x for _, x in sorted(pieces, key=lambda p: p[0])]) for key, pieces in joined.items()
    }


def of_groups(ranks: list[Vectors], K: int) -> list[dict[tuple[str, str, str], Tensor]]:
    return [assembled(ranks[first : first + K]) for first in range(0, len(ranks), K)]


@pytest.mark.threads(unless={"before": (2, 2), "now": (4, 1), "method": EACH_RULE})
@pytest.mark.parametrize(
    ("before", "now"),
    [pytest.param(*way, marks=[pytest.mark.long] if way in LONG else []) for way in WAYS],
)
@pytest.mark.parametrize("method", ALL)
def test_each_part_follows_its_rule(
    run, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, before: Any, now: Any
) -> None:
    caplog.set_level(logging.WARNING)

    def restored(world: Communicator) -> tuple[Any, ...]:
        saved = saved_by(*before, method, tmp_path) if world.rank == 0 else None
        saved = world.gather_objects(saved)[0]
        training = trained(world, now[0], method, seed=1)
        fresh = training.optimizer.method.state_dict()
        load(training, tmp_path)
        states = training.optimizer.method.state_dict()
        vectors = shards_of(training, states)
        training.steps(3)
        return saved, fresh, states, vectors, training.optimizer.reduces_grads

    found = run(now[0] * now[1], restored)
    saved = found[0][0]
    for rank, (_, fresh, states, _, reduces_grads) in enumerate(found):
        for role, state in states.items():
            check_small(role, state, fresh[role], [theirs[role] for theirs, _ in saved])
            if saved[0][0][role].per_rank_params and reduces_grads:
                first = rank // now[1] * before[1]
                some = saved[first : first + before[1]] if before[0] == now[0] else saved
                check_workers(state.per_rank_params, [theirs[role].per_rank_params for theirs, _ in some])
    old = of_groups([vectors for _, vectors in saved], before[1])
    for g, vectors in enumerate(of_groups([vectors for *_, vectors, _ in found], now[1])):
        assert vectors.keys() == {key for key in old[0] if now[0] > 1 or key[0].startswith("grad_reduce")}
        for key, values in vectors.items():
            expected = old[g][key] if before[0] == now[0] else mean([theirs[key] for theirs in old])
            torch.testing.assert_close(values, expected, msg=lambda told, key=key: f"{key}: {told}")


def check_small(role: str, state: State, fresh: State, saved: list[State]) -> None:
    assert state.replicated == saved[0].replicated, role
    for name, value in state.mean.items():
        assert value == pytest.approx(sum(one.mean[name] for one in saved) / len(saved), rel=1e-12)
    assert state.per_rank == fresh.per_rank, role


def check_workers(found: dict[str, dict[str, Tensor]], saved: list[dict[str, dict[str, Tensor]]]) -> None:
    assert found.keys() == saved[0].keys()
    for name, layers in found.items():
        for layer, values in layers.items():
            torch.testing.assert_close(values, mean([one[name][layer] for one in saved]))


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).double().mean(0).to(values[0].dtype)


@pytest.mark.parametrize("now", [(4, 1), (1, 4), (2, 1)])
def test_local_sgd_does_not_fall_back_to_bsp(run, tmp_path: Path, now: Any) -> None:
    """The learning rate fell before the checkpoint: groups keep training locally on any P × K."""

    def apart(world: Communicator) -> bool:
        if world.rank == 0:
            saved_by(2, 2, "post_local", tmp_path)
        world.barrier()
        training = trained(world, now[0], "post_local", seed=1)
        load(training, tmp_path)
        training.steps(1)
        mine = torch.cat([p.detach().double().reshape(-1) for p in training.net.parameters()])
        return any(not torch.equal(mine, theirs) for theirs in world.gather_objects(mine))

    assert run(now[0] * now[1], apart) == [now[0] > 1] * (now[0] * now[1])


@pytest.mark.slow
def test_what_is_dropped_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def resumed(world: Communicator, P: int, method: str) -> None:
        load(trained(world, P, method), tmp_path / method)

    blocks = "sparse local SGD in blocks"
    for method in ("sgp", "selsync", "sasgd", "sparse local SGD", blocks, "hierarchical", "adacomm"):
        saved_by(2, 2, method, tmp_path / method)
    caplog.clear()
    told = {}
    elsewhere = {"sgp": 4, "selsync": 1, "sasgd": 1, "sparse local SGD": 4, blocks: 1, "hierarchical": 4}
    for method, P in elsewhere.items():
        threads.run(4, resumed, P, method)
        told[method] = [r.getMessage() for r in caplog.records if "start anew" in r.getMessage()]
        caplog.clear()
    assert told["sgp"] == ["on 4 × 1 ranks these start anew: weight, under_way of averager"]
    assert told["selsync"] == ["on 1 × 4 ranks these start anew: norms of schedule"]
    assert told["sasgd"] == [
        "on 1 × 4 ranks these start anew: agreed of averager.inner, sums of averager.inner"
    ]
    assert len(told["sparse local SGD"]) == 1
    assert "acc of grad_reduce" in told["sparse local SGD"][0]
    assert "stages, direction, achieved, last_miss of grad_reduce.sparsifier" in told["sparse local SGD"][0]
    assert told[blocks] == ["on 1 × 4 ranks these start anew: blocks of grad_reduce.sparsifier"]
    assert told["hierarchical"] == []


def test_one_ranks_state_elsewhere_is_what_is_the_same_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    """If a script saves only one rank's `optimizer.state_dict()`, only replicated state is restored.

    A warning names what starts anew.
    """

    def state(world: Communicator) -> dict[str, Any]:
        training = trained(world, 2, "diloco")
        some_steps(training)
        return training.optimizer.state_dict()

    saved = threads.run(4, state)[0]

    def loaded(world: Communicator) -> bool:
        training = trained(world, 4, "diloco", seed=1)
        training.optimizer.load_state_dict(saved)
        training.steps(EVERY)
        return training.optimizer.t == SAVED + EVERY

    assert all(threads.run(4, loaded))
    assert any(
        "averager (sharded), which only a checkpoint" in record.getMessage() for record in caplog.records
    )


def test_one_ranks_numbers_stand_for_all() -> None:
    """All ranks restore AdaComm's sum of losses, because it belongs to the restored number of steps."""

    def state(world: Communicator) -> dict[str, Any]:
        training = trained(world, 2, "adacomm")
        some_steps(training)
        return training.optimizer.state_dict()

    def loaded(world: Communicator, saved: dict[str, Any]) -> Any:
        training = trained(world, 4, "adacomm", seed=1)
        training.optimizer.load_state_dict(saved)
        return training.optimizer.method.state_dict()["schedule"].to_dict()

    saved = threads.run(4, state)[0]
    found = saved["hpcsgd"]["method"]["schedule"]
    assert found["mean"]["losses"] > 0
    assert threads.run(4, loaded, saved) == [found] * 4


def test_a_state_with_other_fields_is_refused() -> None:
    def loaded(world: Communicator) -> None:
        training = trained(world, 1, "adacomm")
        state = training.optimizer.state_dict()
        parts = state["hpcsgd"]["method"]
        parts["schedule"] = {"same": parts["schedule"]["replicated"]}
        training.optimizer.load_state_dict(state)

    with pytest.raises(UserError, match=r"^state of a method with same: it is of another version of hpcsgd"):
        threads.run(1, loaded)


def test_a_state_of_before_is_refused() -> None:
    def loaded(world: Communicator) -> None:
        training = trained(world, 1, "hierarchical")
        state = training.optimizer.state_dict()
        del state["hpcsgd"]["place"]
        training.optimizer.load_state_dict(state)

    with pytest.raises(UserError, match="of an older version"):
        threads.run(1, loaded)
