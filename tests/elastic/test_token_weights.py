"""Groups that weigh by their steps and tokens, compared with numpy, and what is kept of the counts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from elastic.conftest import Desk
from elastic.test_elastic_average import replica_groups
from elastic.test_outer_ensemble import Moved, assert_alike, courses
from hpcsgd.comm import Communicator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.errors import UserError
from hpcsgd.methods import ensemble_sync
from hpcsgd.parts.averagers import NESTEROV, PseudoGradientPenalty, RadialDirectional
from hpcsgd.parts.averagers.token_weights import TokenWeights, factor_of, scaled, weight
from radial import radial_directional

RANKS = (1, 2, 1)
TOKENS = (8.0, 16.0, 3.5)
"""For each group, its tokens in a step."""
STEPS = ((3, 1, 0), (2, 2, 5), (0, 0, 4))
"""For each round and group, the steps before it."""
NEVER = 1000
"""Steps between two synchronizations, more than any test makes."""
Model = Mapping[str, Tensor]
BUFFER = "seen"


def stays(ws: Sequence[Tensor]) -> optim.Optimizer:
    """Return the outer optimizer that moves a model by exactly the average."""
    return optim.SGD(ws, lr=1.0)


def change(g: int, r: int, t: int, shape: Sequence[int]) -> Tensor:
    """Return the change of a tensor in step t of group g before round r."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * r + 10 * g + t)).double()


def model_of(net: nn.Module) -> Model:
    return {name: x.detach().clone() for name, x in [*net.named_parameters(), *net.named_buffers()]}


def trained(desk: Desk, **how: Any) -> list[list[Model]]:
    """Return, for each rank, the first model and that after each round of `STEPS`.

    The buffer of group g has the value g before each round.
    """

    def body(g: int, group: Communicator, alive: ElasticAverage) -> list[Model]:
        given = {"sync_every": NEVER, "outer": stays, "tokens_per_step": TOKENS[g], **how}
        moved = Moved(group, alive, torch.float64, **given)
        moved.net.register_buffer(BUFFER, torch.zeros(2, dtype=torch.float64))
        found = [model_of(moved.net)]
        for r, steps in enumerate(STEPS):
            for t in range(steps[g]):
                for p in moved.net.parameters():
                    p.grad = -change(g, r, t, p.shape)
                moved.optimizer.step()
            moved.net.get_buffer(BUFFER).fill_(g)
            moved.optimizer.average_models()
            found.append(model_of(moved.net))
        return found

    with desk.coordinator(len(RANKS)) as at:
        return [found for of_group in replica_groups(at, RANKS, body) for found in of_group]


def changes_before(r: int, shape: Sequence[int]) -> list[Tensor]:
    """Return how each group has changed a tensor before round r."""
    steps = enumerate(STEPS[r])
    return [sum((change(g, r, t, shape) for t in range(n)), torch.zeros(*shape).double()) for g, n in steps]


def weights_in(r: int) -> Any:
    """Return the weights of round r by the definition: c_tokens · c_tokens/c_steps."""
    c_steps = np.array(STEPS[r])
    c_tokens = c_steps * np.array(TOKENS)
    return np.divide(c_tokens * c_tokens, c_steps, out=np.zeros(len(TOKENS)), where=c_steps > 0)


def mean(xs: Sequence[Tensor], weights: Any) -> Tensor:
    return torch.from_numpy(np.average(np.stack([x.numpy() for x in xs]), axis=0, weights=weights))


def merged(xs: Sequence[Tensor], weights: Any) -> Tensor:
    return radial_directional(xs, list(weights)) if xs[0].dim() == 2 else mean(xs, weights)


def test_the_weights_of_the_paper() -> None:
    assert weight(100.0, 10) == 1000.0
    assert weight(0.0, 0) == 0.0
    assert weight(8.0 * 6, 6) == 2 * weight(8.0 * 3, 3)
    assert weight(16.0 * 3, 3) == 4 * weight(8.0 * 3, 3)


@pytest.mark.parametrize("num_fragments", [1, 2])
@pytest.mark.parametrize(("merge", "average"), [(None, mean), (RadialDirectional(), merged)])
def test_the_mean_is_that_of_numpy(desk: Desk, num_fragments: int, merge: Any, average: Any) -> None:
    """A group without steps has no part in it, and buffers are averaged with the same weights.

    Two fragments share the first matrix, so it has a direction in each of them, and is not compared.
    """
    left_out = "0.weight" if merge and num_fragments > 1 else ""
    found = trained(desk, merge=merge, num_fragments=num_fragments)
    for of_rank in found[1:]:
        for models in zip(of_rank, found[0], strict=True):
            assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    for r, (before, after) in enumerate(itertools.pairwise(found[0])):
        weights = weights_in(r)
        for name, x in after.items():
            if name == left_out:
                continue
            if name == BUFFER:
                expected = torch.full_like(x, float(np.average(range(len(TOKENS)), weights=weights)))
            else:
                expected = before[name] + average(changes_before(r, x.shape), weights)
            torch.testing.assert_close(x, expected, msg=f"{name} in round {r}")


def test_a_guard_multiplies_its_weights_with_these(desk: Desk) -> None:
    guard = PseudoGradientPenalty()
    found = trained(desk, guard=guard)[0]
    for r, (before, after) in enumerate(itertools.pairwise(found)):
        changes = {name: changes_before(r, x.shape) for name, x in after.items() if name != BUFFER}
        norms = [torch.cat([x[g].reshape(-1) for x in changes.values()]).norm().item() for g in range(3)]
        both = weights_in(r) * np.array(guard.weights(norms))
        for name, of_tensor in changes.items():
            torch.testing.assert_close(after[name], before[name] + mean(of_tensor, both))


@pytest.mark.parametrize("num_fragments", [1, 3])
@pytest.mark.parametrize("merge", [None, RadialDirectional()])
def test_groups_with_as_many_tokens_have_the_bits_of_the_plain_mean(
    desk: Desk, num_fragments: int, merge: RadialDirectional | None
) -> None:
    changes = [[1.0, 2.0, -1.0, 0.5, 3.0], [2.0, 2.0, -4.0, 1.5, 0.1], [6.0, -1.0, 2.0, 1.0, -3.0]]
    how: dict[str, Any] = {"sync_every": 3, "num_fragments": num_fragments, "merge": merge, "outer": NESTEROV}
    plain = courses(desk, RANKS, changes, torch.float32, **how)
    found = courses(desk, RANKS, changes, torch.float32, tokens_per_step=0.1, **how)
    for mine, theirs in zip(found, plain, strict=True):
        assert_alike([mine, theirs])


def test_without_a_step_all_weigh_alike() -> None:
    assert [factor_of({0: [0.0], 2: [0.0]}, g, 0) for g in (0, 1, 2)] == [1.0] * 3
    assert [factor_of({0: [], 2: []}, g, 0) for g in (0, 1, 2)] == [1.0] * 3
    assert [factor_of({0: [3.0, 1.0], 2: [1.0, 1.0]}, 0, p) for p in (0, 1)] == [1.5, 1.0]


def test_what_has_no_weight_adds_nothing_even_if_it_is_not_finite() -> None:
    broken = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    (found,) = scaled([broken], 0.0)
    assert found.tolist() == [0.0, 0.0]
    assert found.dtype == torch.float32
    assert scaled([broken], 1.0)[0] is broken


@pytest.mark.parametrize(("F", "G"), [(1, 1), (3, 3), (1, 3), (3, 1)])
def test_counts_are_in_the_state(desk: Desk, F: int, G: int) -> None:
    """Group 0 makes three steps and group 1 one; each then loads its state, and they synchronize."""

    def made(group: Communicator, alive: ElasticAverage, n: int) -> Moved:
        how: dict[str, Any] = {"num_fragments": n, "outer": stays, "tokens_per_step": 2.0}
        return Moved(group, alive, torch.float64, sync_every=NEVER, **how)

    def body(g: int, group: Communicator, alive: ElasticAverage) -> Tensor:
        moved, again = made(group, alive, F), made(group, alive, G)
        start = moved.by(0.0)
        moved.optimizer.average_models()
        for _ in range(3 if g == 0 else 1):
            moved.by(1.0 + g)
        with torch.no_grad():
            for mine, theirs in zip(again.net.parameters(), moved.net.parameters(), strict=True):
                mine.copy_(theirs)
        again.optimizer.resume_from(moved.optimizer.t, [{} for _ in again.optimizer.param_groups], None)
        again.optimizer.method.load_state_dict(moved.optimizer.method.state_dict())
        again.optimizer.average_models()
        return again.by(0.0) - start

    with desk.coordinator(2) as at:
        for of_group in replica_groups(at, (1, 2), body):
            for found in of_group:
                torch.testing.assert_close(found, torch.full_like(found, (3 * 3.0 + 1 * 2.0) / 4))


def test_a_state_without_counts_begins_anew() -> None:
    weights = TokenWeights(2.0, 2)
    weights.count_step()
    weights.received(1)
    assert (weights.own, weights.state()) == ([4.0, 0.0], {"local_steps": [1, 0]})
    weights.load({"rest": {}})
    assert weights.own == [0.0, 0.0]
    assert TokenWeights(None, 2).own == []
    assert TokenWeights(None, 2).state() == {}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"outer": None}, "tokens_per_step: it needs an outer optimizer: pass outer as well"),
        ({"tokens_per_step": 0.0}, "tokens_per_step = 0: expected a number above 0"),
        ({"tokens_per_step": float("nan")}, "ensemble_sync: tokens_per_step = nan: expected a number"),
        ({"tokens_per_step": float("inf")}, "tokens_per_step = inf: expected a number above 0"),
        ({"tokens_per_step": "many"}, "ensemble_sync: tokens_per_step = 'many': expected a"),
    ],
)
def test_what_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"^{why}") as refused:
        ensemble_sync(8, **{"outer": NESTEROV, "tokens_per_step": 4096, **given})
    assert "\n" not in str(refused.value)
