"""Tests of every method of the table, on every shape and with several optimizers, against plain torch.

On the test device, they are compared with the same training on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_map

import hpcsgd
from far.ranks import FOR_TRAININGS, PLACINGS, by_default, explicitly, tolerance
from hpcsgd.comm import Communicator
from hpcsgd.methods import METHODS, bsp, hierarchical
from methods.invariants import Invariant
from methods.table import EVERY, EXCEPTIONS, RATES, REFERENCES, STEPS, Case, Exempt, uncovered
from references import MakeOptimizer, big_batch, distributed, follow, following, one_step, same
from references import model as make_model
from shapes import some

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
}
SHAPES = [(P, K) for P in (1, 2, 4) for K in (1, 2, 4)] + [(3, 2)]
REMEMBERING = {"delayed", "osgp", "sasgd", "selsync", "sparseloco"}
"""Methods that keep state, each in a different way.

`tests/checkpoint/test_snapshot.py` restores all of them from disk in processes.
"""
ENTRIES: Mapping[str, Case | Exempt] = {**REFERENCES, **EXCEPTIONS}


def test_every_method_has_a_reference_or_a_reason_for_none() -> None:
    missing = uncovered(METHODS, REFERENCES, EXCEPTIONS)
    assert not missing, f"{', '.join(missing)}: in tests/methods/table.py, say what each comes to"
    assert {entry.method for entry in ENTRIES.values()} <= METHODS.keys()
    assert len(ENTRIES) == len(REFERENCES) + len(EXCEPTIONS)
    for exempt in EXCEPTIONS.values():
        assert exempt.reason
        assert exempt.invariants


def test_a_method_that_nothing_is_about_is_found() -> None:
    assert uncovered({**METHODS, "planted": bsp}, REFERENCES, EXCEPTIONS) == ["planted"]
    others = {label: case for label, case in REFERENCES.items() if case.method != "selsync"}
    assert uncovered(METHODS, others, EXCEPTIONS) == ["selsync"]
    assert "ad_psgd" in uncovered(METHODS, REFERENCES, {})


def with_optimizers(shapes: Sequence[tuple[int, int]], optimizers: Iterable[str] = OPTIMIZERS) -> list[Any]:
    """Return every shape with every optimizer.

    `make test-all` runs the shapes of four ranks with every optimizer. It runs the others with the last one
    only, and leaves out those of more than eight ranks, and of eight ranks with P ≤ K.
    """
    *_, last = optimizers

    def often(P: int, K: int, name: str) -> bool:
        return P * K == 4 or (name == last and (P * K < 8 or (P * K == 8 and P > K)))

    return [
        pytest.param(P, K, name, marks=[] if often(P, K, name) else [pytest.mark.long])
        for P, K in shapes
        for name in optimizers
    ]


def methods_and_optimizers(shapes: Sequence[tuple[int, int]]) -> list[Any]:
    """Return every method that has a reference, with its shapes and optimizers."""
    return [
        pytest.param(label, *setting.values, marks=setting.marks)
        for label, case in REFERENCES.items()
        for setting in with_optimizers(shapes, ["SGD"] if case.plain_sgd else ["momentum", "AdamW"])
    ]


def trained(
    world: Communicator, P: int, entry: Case | Exempt, make: MakeOptimizer, device: torch.device | None = None
) -> list[Tensor]:
    return distributed(world, P, entry.new(), make, STEPS, rates=RATES, form=entry.form, device=device)


@pytest.mark.every_method
@pytest.mark.threads(unless={"P": 2, "K": 2, "optimizer": {"AdamW", "SGD"}})
@pytest.mark.parametrize(("method", "P", "K", "optimizer"), methods_and_optimizers(SHAPES))
def test_equals_plain_torch(run, method: str, P: int, K: int, optimizer: str) -> None:
    case, make = REFERENCES[method], OPTIMIZERS[optimizer]
    same(run(P * K, trained, P, case, make), case.expected(P, K, make), K)


@pytest.mark.threads(unless={"method": {"bsp", "diloco", "hierarchical"}})
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "method",
    [label for label in REFERENCES if not label.startswith("sparseloco") and "in few bits" not in label],
)
def test_so_where_no_shard_cuts_a_tensor(run, method: str) -> None:
    """Shards that contain only whole tensors, as with Muon, change no result.

    The padding where tensors leave a shard unfilled has no effect. Quantizers of few bits and selections are
    left out: the shards decide which elements share a scale or compete with each other.
    """
    case = REFERENCES[method]
    make = OPTIMIZERS["SGD" if case.plain_sgd else "momentum"]

    def undivided(world: Communicator) -> list[Tensor]:
        owned: dict[str, Any] = {"elementwise": False, "tensorwise": True}
        return distributed(world, 2, case.new(), make, STEPS, rates=RATES, form=case.form, **owned)

    same(run(4, undivided), case.expected(2, 2, make), 2)


@pytest.mark.threads(unless={"K": 4, "optimizer": "AdamW"})
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("method", EXCEPTIONS)
def test_one_group_has_nobody_to_wait_for(run, method: str, K: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    expected = big_batch(K, following(RATES, make), STEPS)
    same(run(K, trained, 1, EXCEPTIONS[method], make), [[w] for w in expected], K)


@pytest.mark.parametrize(("P", "K"), some([(2, 1), (3, 1), (2, 2), (4, 1), (7, 1)], {(3, 1), (2, 2), (7, 1)}))
@pytest.mark.parametrize(
    ("method", "invariant"),
    [
        pytest.param(label, invariant, id=f"{label}-{invariant.__name__}")
        for label, entry in ENTRIES.items()
        for invariant in entry.invariants
    ],
)
def test_invariants(run, method: str, invariant: Invariant, P: int, K: int) -> None:
    invariant(run, ENTRIES[method].new, P, K)


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), some([(1, 2), (1, 4), (2, 2), (2, 4)], {(1, 4), (2, 2)}))
@pytest.mark.parametrize("method", ENTRIES)
def test_positions_of_a_group_hold_the_same_bits(run, method: str, P: int, K: int) -> None:
    entry = ENTRIES[method]
    optimizer = "SGD" if isinstance(entry, Case) and entry.plain_sgd else "AdamW"
    ranks = run(P * K, trained, P, entry, OPTIMIZERS[optimizer])
    for rank, history in enumerate(ranks):
        first = ranks[rank - rank % K]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(history, first, strict=True))


@pytest.mark.parametrize(("P", "K"), [(1, 1), (1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-4},
        {"overlap_grad_reduce": False},
        {"bucket_cap_mb": 1e-4, "overlap_grad_reduce": False},
    ],
)
def test_buckets_and_overlap_change_nothing(run, P: int, K: int, options: dict[str, Any]) -> None:
    make = OPTIMIZERS["momentum"]
    plain = run(P * K, lambda world: distributed(world, P, hierarchical(EVERY), make, STEPS))
    other = run(P * K, lambda world: distributed(world, P, hierarchical(EVERY), make, STEPS, **options))
    for mine, theirs in zip(plain, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.threads(unless={"P": 2, "K": 2, "optimizer": {"AdamW", "SGD"}, "method": REMEMBERING})
@pytest.mark.parametrize(
    ("method", "P", "K", "optimizer"),
    methods_and_optimizers([(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2)]),
)
def test_state_survives_a_round_trip(run, method: str, P: int, K: int, optimizer: str) -> None:
    """A state saved after 4 steps and loaded into a new model and optimizer leads to the same bits.

    Methods that add updates in the order of arrival are compared up to rounding.
    """
    case, make = REFERENCES[method], OPTIMIZERS[optimizer]

    def whole_and_resumed(world: Communicator) -> tuple[Tensor, Tensor]:
        topology = case.form(world, P)

        def new() -> tuple[nn.Module, hpcsgd.DistributedOptimizer, Callable[[range], None]]:
            net = make_model()
            optimizer = hpcsgd.DistributedOptimizer(make(list(net.parameters())), net, topology, case.new())
            set_rate = follow(optimizer, RATES)

            def train(steps: range) -> None:
                for t in steps:
                    set_rate(t)
                    one_step(net, optimizer, topology, t)

            return net, optimizer, train

        net, optimizer, train = new()
        train(range(4))
        weights, state = {k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict()
        saved = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
        train(range(4, STEPS))
        again, resumed, go_on = new()
        with torch.no_grad():
            again.load_state_dict(weights)
        resumed.load_state_dict(saved)
        go_on(range(4, STEPS))
        flat = [torch.cat([p.detach().reshape(-1) for p in n.parameters()]) for n in (net, again)]
        return flat[0], flat[1]

    for whole, resumed in run(P * K, whole_and_resumed):
        torch.testing.assert_close(whole, resumed, rtol=0, atol=0 if case.same_bits else 1e-13)


QUICK = ("hierarchical",)
"""The methods whose streams `make test-all` slows one by one."""


def on_devices(labels: Iterable[str], shapes: Sequence[tuple[int, int]], quick: tuple[int, int]) -> list[Any]:
    """Return entries × shapes × placings; all but one of each entry are for `make test-long`."""
    placings, made = list(PLACINGS), []
    for i, label in enumerate(labels):
        for P, K in shapes:
            for placing in placings:
                marks = [] if quick == (P, K) and placing == placings[i % 2] else [pytest.mark.long]
                made.append(pytest.param(label, P, K, placing, marks=marks))
    return made


@pytest.mark.slow
@pytest.mark.threads(unless={"method": {"hierarchical", "sgp"}, "P": 2, "K": 2})
@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(("method", "P", "K", "placing"), on_devices(REFERENCES, SHAPES, (2, 2)))
def test_on_devices_the_bits_are_those_on_the_host(run, method: str, P: int, K: int, placing: str) -> None:
    case = REFERENCES[method]
    for optimizer in ["SGD"] if case.plain_sgd else ["AdamW", "momentum"][: 1 if (P, K) == (2, 2) else 2]:
        make = OPTIMIZERS[optimizer]
        here = run(P * K, trained, P, case, make)
        there = run(P * K, PLACINGS[placing](trained), P, case, make)
        for mine, theirs in zip(here, there, strict=True):
            for w, v in zip(mine, theirs, strict=True):
                torch.testing.assert_close(w, v, **tolerance(case.same_bits))


@pytest.mark.slow
@pytest.mark.usefixtures("far_device")
@pytest.mark.ranks(4)
@pytest.mark.parametrize("pattern", FOR_TRAININGS)
@pytest.mark.parametrize(
    "method",
    [pytest.param(label, marks=[] if label in QUICK else [pytest.mark.long]) for label in REFERENCES],
)
def test_on_devices_whichever_stream_is_slow(run, method: str, pattern: str) -> None:
    case, make = REFERENCES[method], OPTIMIZERS["SGD"]
    here = run(4, trained, 2, case, make)
    there = run(4, explicitly(trained, FOR_TRAININGS[pattern]), 2, case, make)
    same(there, [list(ranks) for ranks in zip(*here[::2], strict=True)], 2)


@pytest.mark.threads(unless={"method": "ad_psgd", "K": 2})
@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(
    ("method", "P", "K", "placing"), on_devices(EXCEPTIONS, [(1, 1), (1, 2), (1, 4)], (1, 2))
)
def test_on_devices_one_group_has_nobody_to_wait_for(run, method: str, P: int, K: int, placing: str) -> None:
    make = OPTIMIZERS["AdamW"]
    expected = big_batch(K, following(RATES, make), STEPS)
    same(run(K, PLACINGS[placing](trained), P, EXCEPTIONS[method], make), [[w] for w in expected], K)


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize(("P", "K"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("method", "invariant"),
    [
        pytest.param(
            label,
            invariant,
            id=f"{label}-{invariant.__name__}",
        )
        for label, entry in EXCEPTIONS.items()
        for invariant in entry.invariants
    ],
)
def test_invariants_on_devices(run, method: str, invariant: Invariant, P: int, K: int) -> None:
    def on_devices(n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        return run(n, by_default(function), *args)

    invariant(on_devices, ENTRIES[method].new, P, K)
