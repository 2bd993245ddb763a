"""Tests that an averager returns every vector, and that it works only while its result is iterated over."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.averager import Averager, Traits, run_averager
from hpcsgd.core.graphs import Ring
from hpcsgd.core.optional import prepare
from hpcsgd.core.step import StepContext
from hpcsgd.core.topology import form
from hpcsgd.core.waits import All, InNeighbors, Pairs, Unknown, later
from hpcsgd.methods.delayed import Delayed
from hpcsgd.methods.des_loc import Desynced, Periods
from hpcsgd.methods.diloco import OuterOptimizer
from hpcsgd.methods.streaming import Streaming
from hpcsgd.parts.averagers import AverageState, Mean, MeanOfAll, QuantizedMean, ResetState, WithDistance
from hpcsgd.parts.averagers.outer_step import NESTEROV
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.schedules.every import InTurn

ROOT = Path(__file__).parents[2]
WRAPPERS = {
    "averaged": AverageState,
    "delayed": lambda inner: Delayed(inner, 1),
    "des_loc": lambda inner: Desynced(inner, 2, Periods(2, 2, {})),
    "diloco": lambda inner: OuterOptimizer(inner, NESTEROV, lambda _: None),
    "measured": WithDistance,
    "reset": ResetState,
    "streaming": lambda inner: Streaming(inner, InTurn(2, 1), 2, 0.5),
}


LATE = {"delayed": 1, "streaming": 2}


def dropped(source: str) -> list[int]:
    """Return the lines that drop the result of `average`, so that nothing is averaged."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "average"
    ]


@pytest.mark.slow
def test_nobody_drops_what_an_averager_returns() -> None:
    assert dropped("Mean().average(vectors, s)\nlist(Mean().average(vectors, s))") == [1]
    files = [path for folder in ("hpcsgd", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path): lines for path in files if (lines := dropped(path.read_text()))}
    assert not found, "use run_averager"


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    "traits",
    [
        Traits(All()),
        Traits(Pairs(seed=1, every=3), whole_model=True, histogram_names=("staleness",)),
        Traits(InNeighbors(Ring(), 1), reads_gradients=False, leaves_mean=True, vectors_only=True),
        Traits(Unknown("it goes by the weather")),
    ],
)
def test_traits_are_those_of_the_one_inside_but_for_what_changes(name: str, traits: Traits) -> None:
    class Inner(OneTooFew):
        pass

    inner = Inner()
    inner.traits = traits
    found = WRAPPERS[name](inner).traits
    assert found.whole_model == traits.whole_model
    assert found.histogram_names == traits.histogram_names
    assert not found.elastic
    assert found.waits == later(traits.waits, LATE.get(name, 0))
    assert found.leaves_mean <= traits.leaves_mean
    assert found.vectors_only <= traits.vectors_only
    if name != "streaming":  # which prepares averagers of fragments only once
        assert found.reads_gradients == traits.reads_gradients


class OneTooFew:
    """An averager that does not return the last vector."""

    traits = Traits(All())

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        return list(vectors)[:-1]


def test_an_averager_that_returns_too_few_vectors_is_an_error() -> None:
    def step(world: Communicator) -> None:
        net = nn.Linear(2, 2)
        method = hpcsgd.Method(hpcsgd.Dense(), Every(1), OneTooFew())
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, 2), method)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match="zip"):
        threads.run(2, step)


@pytest.mark.parametrize("new", [Mean, MeanOfAll, lambda: QuantizedMean(hpcsgd.quantizers.fp16())])
def test_what_is_returned_are_the_vectors(new: type[Averager]) -> None:
    def same(world: Communicator) -> bool:
        net = nn.Linear(2, 2)
        inner = optim.SGD(net.parameters(), lr=0.1)
        made = hpcsgd.DistributedOptimizer(inner, net, form(world, 2), hpcsgd.bsp())
        vectors = made._step.shards
        averager = WithDistance(new())
        prepare(averager, vectors, made._step)
        return all(
            a is b for a, b in zip(run_averager(averager, iter(vectors), made._step), vectors, strict=True)
        )

    assert threads.run(2, same) == [True] * 2


class Prepared:
    """An averager that records when its `prepare` is called."""

    traits = Traits(All())

    def __init__(self, name: str, asked: list[str], inner: Averager) -> None:
        self.name, self.asked, self.inner = name, asked, inner

    def prepare(self, vectors: object, s: object) -> None:
        self.asked.append(self.name)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterator[Tensor]:
        yield from self.inner.average(vectors, s)


def test_those_inside_prepare_after_those_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    inside = Prepared("inside", asked, Mean())
    around = Prepared("around", asked, WithDistance(inside))
    prepare(around, [], None)  # type: ignore[arg-type]
    assert asked == ["around", "inside"]
