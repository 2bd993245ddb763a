"""Tests of methods' states: they do not change later, and consist of plain values in known fields."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.method import fitted
from hpcsgd.core.state import State
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import (
    Method,
    ad_psgd,
    bsp,
    delayed,
    diloco,
    hierarchical,
    noloco,
    osgp,
    sasgd,
    sparseloco,
    streaming,
)
from hpcsgd.parts import quantizers
from hpcsgd.parts.averagers import PseudoGradientPenalty, RadialDirectional
from hpcsgd.parts.grad_reduces import AllToAll, Quantized, Sparse
from hpcsgd.parts.sparsifiers import ExDyna, SIDCo, TopK
from references import model, one_step

METHODS: dict[str, Callable[[], Method]] = {
    "ad_psgd": ad_psgd,
    "delayed": lambda: delayed(hierarchical(2), 2),
    "delayed in few bits": lambda: delayed(diloco(2, quantize=quantizers.int8()), 1),
    "diloco": lambda: diloco(2),
    "exdyna": lambda: hierarchical(2, Sparse(ExDyna(0.3))),
    "guarded": lambda: delayed(diloco(2, guard=PseudoGradientPenalty()), 1),
    "guarded fragments": lambda: streaming(hierarchical(4, guard=PseudoGradientPenalty()), 2, 1),
    "noloco": lambda: noloco(2),
    "packed": lambda: bsp(Quantized(quantizers.int8(), quantizers.int8())),
    "radial-directional": lambda: delayed(diloco(2, merge=RadialDirectional()), 1),
    "radial-directional fragments": lambda: streaming(diloco(4, merge=RadialDirectional()), 2, 1),
    "sasgd": lambda: sasgd(4),
    "osgp": lambda: osgp(1),
    "sidco": lambda: hierarchical(2, Sparse(SIDCo(0.3))),
    "sparse": lambda: hierarchical(2, Sparse(TopK(0.2))),
    "sparseloco": lambda: sparseloco(2),
    "streaming": lambda: streaming(diloco(4), 2, 1),
}


def training(world: Communicator, name: str) -> hpcsgd.DistributedOptimizer:
    net = model()
    inner = optim.SGD(net.parameters(), lr=0.1)
    return hpcsgd.DistributedOptimizer(inner, net, form(world, 2), METHODS[name]())


def steps(optimizer: hpcsgd.DistributedOptimizer, count: int) -> None:
    for t in range(optimizer.t, optimizer.t + count):
        one_step(optimizer.model, optimizer, optimizer.topology, t)


def tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(each)


def same(one: Any, other: Any) -> bool:
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return bool(pairs) and all(torch.equal(x, y) for x, y in pairs)


def of_method(optimizer: hpcsgd.DistributedOptimizer) -> Any:
    return optimizer.state_dict()["hpcsgd"]["method"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"sidco"}))
def test_later_steps_change_no_state_that_was_saved_or_loaded(name: str) -> None:
    def one(world: Communicator) -> None:
        first, again = training(world, name), training(world, name)
        steps(first, 3)
        saved = first.state_dict()
        parts = saved["hpcsgd"]["method"]
        before = copy.deepcopy(parts)
        steps(first, 3)
        assert same(parts, before)
        again.load_state_dict(saved)
        steps(again, 3)
        assert same(parts, before)

    threads.run(4, one)


@pytest.mark.parametrize("name", METHODS)
def test_torch_loads_it_without_any_class(name: str) -> None:
    """`torch.load` with `weights_only` refuses objects of classes that it does not know."""

    def one(world: Communicator) -> None:
        optimizer = training(world, name)
        steps(optimizer, 3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert same([*tensors(loaded), torch.ones(1)], [*tensors(optimizer.state_dict()), torch.ones(1)])
        again = training(world, name)
        again.load_state_dict(loaded)
        assert again.t == 3

    threads.run(4, one)


def test_a_clone_shares_no_memory() -> None:
    x = torch.zeros(3)
    state = State(
        replicated={"nested": [{"x": x}, (x,)]},
        mean={"loss": 1.0},
        sharded={"theta": [x[:2], x[2:]]},
        per_rank_params={"acc": {"w": x.view(3, 1)}},
        per_rank={"norms": [x]},
    )
    cloned = state.cloned()
    x.fill_(1.0)
    assert cloned.to_dict().keys() == state.to_dict().keys()
    assert all(not found.any() for found in tensors(cloned.to_dict()))
    assert cloned.mean == {"loss": 1.0}
    assert [found.shape for found in tensors(cloned.to_dict())] == [y.shape for y in tensors(state.to_dict())]


def test_what_is_empty_is_not_written() -> None:
    assert State().to_dict() == {}
    state = State(replicated={"t": 3}, per_rank={"weight": 0.5})
    assert state.to_dict() == {"replicated": {"t": 3}, "per_rank": {"weight": 0.5}}
    assert State.from_dict(state.to_dict()) == state
    assert state.not_shared() == ["per_rank"]


def test_fields_that_a_state_does_not_have_are_refused() -> None:
    with pytest.raises(UserError) as told:
        State.from_dict({"chunks": {}, "replicated": {}, "own": {}})
    assert str(told.value) == (
        "state of a method with chunks, own: it is of another version of hpcsgd, and only that can load it"
    )


class Untyped(AllToAll):
    """A gradient reduction written by the user, which returns a plain dict as its state."""

    def state_dict(self) -> State:
        return cast(State, {"same": {"t": 1}})

    def load_state_dict(self, state: State) -> None:
        pass


def test_a_part_that_returns_no_state_is_refused() -> None:
    with pytest.raises(UserError) as told:
        bsp(Untyped()).state_dict()
    assert str(told.value) == "Method: grad_reduce.inner.state_dict() = {'same': {'t': 1}}: expected a State"


@pytest.mark.parametrize(("aloud", "lines"), [(True, 1), (False, 0)])
def test_one_rank_tells_what_another_shape_discards(
    caplog: pytest.LogCaptureFixture, aloud: bool, lines: int
) -> None:
    states = {"averager": State(replicated={"t": 3}, per_rank={"weight": 0.5})}
    assert fitted(states, [], same_ranks=False, aloud=aloud) == {"averager": State(replicated={"t": 3})}
    assert [("discarded averager (per_rank)" in line) for line in caplog.messages] == [True] * lines
