"""Ranks with different models, optimizers, methods or options get an error when they wrap the optimizer."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer, JobError, Method, bsp, hierarchical
from hpcsgd.comm import Communicator
from hpcsgd.comm.alike import Fact, difference
from hpcsgd.core.topology import form
from hpcsgd.engine.alike import SHORT, checksum, in_words, is_ours, method_facts, settings
from hpcsgd.parts.averagers import NESTEROV
from methods.table import EXCEPTIONS, REFERENCES
from references import batch, loss, one_step
from references import model as make_model

Params = list[nn.Parameter]


def of(make: Callable[..., optim.Optimizer], **options: Any) -> Callable[[Params], optim.Optimizer]:
    return partial(make, **options)


def in_groups(at: int) -> Callable[[Params], optim.Optimizer]:
    return lambda ps: optim.SGD([{"params": ps[:at], "lr": 0.5}, {"params": ps[at:]}], lr=0.1)


SGD = of(optim.SGD, lr=0.1, momentum=0.5)

OPTIMIZERS: dict[str, tuple[Callable[[Params], optim.Optimizer], str]] = {
    "lr": (of(optim.SGD, lr=0.2, momentum=0.5), "lr of param group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
    "a tensor": (
        of(optim.SGD, lr=torch.tensor(0.25), momentum=0.5),
        "lr of param group 0 is 0.1 on rank 0 and 0.25 on rank 1",
    ),
    "momentum": (of(optim.SGD, lr=0.1, momentum=0.6), "momentum of param group 0 is 0.5 on rank 0 and 0.6"),
    "weight decay": (
        of(optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1),
        "weight_decay of param group 0 is 0 on rank 0 and 0.1 on rank 1",
    ),
    "class": (
        of(optim.Adam, lr=0.1),
        "the optimizer is torch.optim.sgd.SGD on rank 0 and torch.optim.adam.Adam on rank 1",
    ),
    "order": (
        lambda ps: SGD(ps[::-1]),
        "parameter 0 of param group 0 is 0.weight on rank 0 and 3.bias on rank 1",
    ),
    "groups": (in_groups(3), "the number of param groups is 1 on rank 0 and 2 on rank 1"),
}


def wrapped(
    world: Communicator,
    make: Callable[[Params], optim.Optimizer] = SGD,
    method: Method | None = None,
    **options: Any,
) -> str:
    net = make_model()
    inner = make(list(net.parameters()))
    with pytest.raises(JobError) as error:
        DistributedOptimizer(inner, net, form(world), method or hierarchical(2), **options)
    return str(error.value)


@pytest.mark.parametrize("unlike", OPTIMIZERS)
@pytest.mark.parametrize("n", [2])
def test_unlike_optimizers(run, n: int, unlike: str) -> None:
    make, told = OPTIMIZERS[unlike]
    messages = run(n, lambda world: wrapped(world, make if world.rank == 1 else SGD))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"ranks 0 and 1 differ: {told}")
    assert messages[0].endswith(": give all ranks the same")


def adam(net: nn.Module, steps: int) -> optim.Optimizer:
    """Return Adam over `net` after some `steps`."""
    optimizer = optim.Adam(net.parameters(), lr=0.1)
    for t in range(steps):
        optimizer.zero_grad()
        loss(net, *batch(t, 0)).backward()
        optimizer.step()
    return optimizer


OTHER_STATES: dict[str, tuple[Callable[[nn.Module], optim.Optimizer], str]] = {
    "missing": (
        lambda net: adam(net, 0),
        r"is step, exp_avg, exp_avg_sq of checksum \w{8} on rank 0 and missing on rank 1: give all",
    ),
    "earlier": (
        lambda net: adam(net, 1),
        r"is step, .* of checksum \w{8} on rank 0 and step, .* \w{8} on rank 1: give all",
    ),
}


@pytest.mark.parametrize("unlike", OTHER_STATES)
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.ranks(2)
def test_state_that_was_loaded_on_one_rank_alone(run, P: int, unlike: str) -> None:
    make, told = OTHER_STATES[unlike]

    def body(world: Communicator) -> str:
        net = make_model()
        inner = adam(net, 2) if world.rank == 0 else make(net)
        with pytest.raises(JobError) as error:
            DistributedOptimizer(inner, net, form(world, P), hierarchical(2))
        return str(error.value)

    for message in run(2, body):
        assert re.search(rf"the optimizer's state of 0.weight \(load it on all ranks\) {told} ranks", message)


@pytest.mark.ranks(2)
def test_the_same_state_on_all_ranks(run) -> None:
    def body(world: Communicator) -> None:
        net = make_model()
        DistributedOptimizer(adam(net, 2 + world.size), net, form(world), bsp())

    run(2, body)


def test_checksums_of_nested_state() -> None:
    x = torch.arange(6.0).view(2, 3)
    state = {"a": [x, {"b": torch.tensor(2)}], "c": 1.5, "d": None}
    assert checksum(state) == checksum(copy.deepcopy(state))
    for unlike in (
        {**state, "c": 1.25},
        {**state, "a": [x + 1, state["a"][1]]},
        {**state, "a": [x, {"b": torch.tensor(3)}]},
    ):
        assert checksum(unlike) != checksum(state)
    for dtype in (torch.bfloat16, torch.bool, torch.complex64):
        assert checksum(x.to(dtype).t()) == checksum(x.to(dtype).t().contiguous())


@pytest.mark.parametrize("n", [2])
def test_param_groups_that_are_cut_elsewhere(run, n: int) -> None:
    told = run(n, lambda world: wrapped(world, in_groups(2 + world.rank)))[0]
    assert "the number of parameters of param group 0 is 2 on rank 0 and 3 on rank 1" in told


@pytest.mark.parametrize("n", [2])
def test_betas(run, n: int) -> None:
    told = run(n, lambda world: wrapped(world, of(optim.Adam, betas=(0.9, 0.99 + world.rank / 1000))))[0]
    assert "betas of param group 0 is (0.9, 0.99) on rank 0 and (0.9, 0.991) on rank 1" in told


METHODS: dict[str, tuple[Callable[[], Method], str]] = {
    "sync_every": (lambda: hierarchical(3), "the method's schedule.I is 2 on rank 0 and 3 on rank 1"),
    "method": (bsp, "the method's grad_reduce is Dense on rank 0 and AcrossGroups on rank 1"),
    "grad_reduce": (
        lambda: hierarchical(2, grad_reduce=hpcsgd.ReduceScatter()),
        "the method's grad_reduce is Dense on rank 0 and ReduceScatter on rank 1",
    ),
    "wire": (
        lambda: hierarchical(2, quantize=hpcsgd.quantizers.int8()),
        "the method's averager.inner is Mean on rank 0 and QuantizedMean on rank 1",
    ),
    "wrapper": (
        lambda: hpcsgd.delayed(hierarchical(2), sync_delay=1),
        "the method's averager is WithDistance on rank 0 and Delayed on rank 1",
    ),
}


@pytest.mark.parametrize("unlike", METHODS)
@pytest.mark.parametrize("n", [2])
def test_unlike_methods(run, n: int, unlike: str) -> None:
    make, told = METHODS[unlike]
    messages = run(n, lambda world: wrapped(world, method=make() if world.rank == 1 else hierarchical(2)))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"ranks 0 and 1 differ: {told}")


UNLIKE_NUMBERS: dict[str, Callable[[int], Method]] = {
    "averager.make_optimizer.options.lr is 0.5 on rank 0 and 0.75 on rank 1": lambda rank: hpcsgd.diloco(
        2, lambda ws: optim.SGD(ws, lr=0.5 + rank / 4)
    ),
    "averager.rule.buffer_size is 1 on rank 0 and 2 on rank 1": lambda rank: hpcsgd.async_diloco(
        2, buffer_size=1 + rank
    ),
}


@pytest.mark.parametrize("told", UNLIKE_NUMBERS)
@pytest.mark.parametrize("n", [2])
def test_numbers_inside_a_method(run, n: int, told: str) -> None:
    messages = run(n, lambda world: wrapped(world, method=UNLIKE_NUMBERS[told](world.rank)))
    assert messages[0].startswith(f"ranks 0 and 1 differ: the method's {told}")


OPTIONS: dict[str, Sequence[Any]] = {
    "gradient_accumulation_steps": (1, 2),
    "bucket_cap_mb": (0.5, 1.0),
    "overlap_grad_reduce": (True, False),
    "overlap_param_gather": (False, True),
    "elementwise": (None, False),
    "tensorwise": (True, None),
    "master_dtype": (None, torch.float32),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("n", [2])
def test_unlike_options(run, n: int, option: str) -> None:
    a, b = OPTIONS[option]
    told = run(n, lambda world: wrapped(world, **{option: OPTIONS[option][world.rank]}))
    assert (
        told
        == [
            f"ranks 0 and 1 differ: option {option} is {a} on rank 0 and {b} on rank 1: "
            "give all ranks the same"
        ]
        * n
    )


@pytest.mark.parametrize("n", [4])
def test_who_has_what(run, n: int) -> None:
    told = run(n, lambda world: wrapped(world, of(optim.SGD, lr=0.1 * (1 + world.rank % 2))))[3]
    assert "lr of param group 0 is 0.1 on ranks 0, 2 and 0.2 on ranks 1, 3" in told


def test_the_same_things_in_another_order() -> None:
    facts: list[Fact] = [("buffer a", "float"), ("buffer b", "float")]
    told = "0 and 2 differ: what comes before buffer a is nothing on ranks 0, 1 and buffer b on rank 2"
    assert difference(dict(enumerate([facts, facts, facts[::-1]]))).startswith(told)


def test_only_the_first_ranks_are_named() -> None:
    a, b = [("lr", "1")], [("lr", "2")]
    told = "lr is 1 on ranks 0, 1, 2, 3 and 2 on ranks 4, 5, 6, 7 and 1 more"
    assert told in difference(dict(enumerate([a] * 4 + [b] * 5)))


class Unlike:
    """A large object, of which the description has the type and no address."""


def mine(s: object) -> bool:
    return True


def test_values_in_words() -> None:
    assert in_words([0.9, 0.99]) == in_words((0.9, 0.99)) == "(0.9, 0.99)"
    assert in_words(Unlike()) == in_words(Unlike()) == f"{__name__}.Unlike"
    assert in_words(mine) == f"{__name__}.mine"
    assert in_words(partial(mine, 3)) == f"{__name__}.mine with (3) and {{}}"
    assert in_words(torch.zeros(3, 2)) == "a tensor of (3, 2), torch.float32"
    assert "0x" not in in_words(torch.Generator())
    assert in_words({"a": {8, 1}}) == "{'a': (1, 8)}"  # a set may have them in the other order
    assert in_words(slice("a" * SHORT)) == "builtins.slice"
    assert in_words(list) == "builtins.list"


def every_method() -> dict[str, Method]:
    """Return one method of each kind, with various parts."""
    sparse = hpcsgd.Sparse(hpcsgd.SIDCo(0.1))
    packed = hpcsgd.Quantized(hpcsgd.quantizers.int8(), hpcsgd.quantizers.bf16())
    return {
        "bsp": bsp(sparse),
        "packed": hierarchical(2, grad_reduce=packed, quantize=hpcsgd.quantizers.int4()),
        "moments": hierarchical(2, optimizer_state=hpcsgd.AverageState),
        **{label: case.new() for label, case in {**REFERENCES, **EXCEPTIONS}.items()},
        "ensemble": hpcsgd.ensemble_sync(2),
        "ensemble with an outer optimizer": hpcsgd.ensemble_sync(2, outer=NESTEROV),
    }


def inside(part: Any) -> Iterator[Any]:
    """Yield `part` and what it is made with, as far as that is of this package."""
    yield part
    for setting in settings(part).values() if is_ours(part) else ():
        if is_ours(setting) and not isinstance(setting, Method) and not inspect.isroutine(setting):
            yield from inside(setting)


@pytest.mark.parametrize("name", every_method())
def test_parts_keep_what_they_are_made_with_by_name(name: str) -> None:
    """Otherwise a difference in an argument between two ranks would not be found."""
    for role, part in ((role, x) for role, found in every_method()[name].by_role() for x in inside(found)):
        if not dataclasses.is_dataclass(part) and type(part).__init__ is not object.__init__:
            assert list(settings(part)) == list(inspect.signature(type(part)).parameters), role


@pytest.mark.parametrize("name", every_method())
def test_methods_made_alike_are_alike(name: str) -> None:
    a, b = (list(method_facts(every_method()[name])) for _ in range(2))
    assert a == b
    assert "0x" not in repr(a)


@pytest.mark.parametrize("n", [2])
def test_what_a_method_remembers_may_differ(run, n: int) -> None:
    """A method may be used again after its optimizer was deleted.

    What it has stored may differ between ranks.
    """

    def twice(world: Communicator) -> float:
        topology, method = form(world, groups=n), hpcsgd.adacomm(2, 2)
        for _ in range(2):
            net = make_model()
            optimizer = DistributedOptimizer(SGD(list(net.parameters())), net, topology, method)
            optimizer.step(loss=1.0 + world.rank)
            method.schedule.block_state.losses += world.rank  # type: ignore[attr-defined]
            del optimizer, net
        return 1.0

    assert run(n, twice) == [1.0] * n


@pytest.mark.parametrize("n", [2])
def test_alike_ranks_train(run, n: int) -> None:
    def train(world: Communicator) -> torch.Tensor:
        topology, net = form(world), make_model()
        inner = optim.Adam(net.parameters(), lr=0.01, betas=(0.9, 0.99))
        optimizer = DistributedOptimizer(inner, net, topology, hpcsgd.diloco(2), bucket_cap_mb=1)
        return one_step(net, optimizer, topology, 0)

    a, b = run(n, train)
    assert torch.equal(a, b)


def frozen(rank: int) -> nn.Module:
    net = make_model()
    net.append(nn.Linear(3, 3 + rank % 2).requires_grad_(False))
    return net


def buffered(rank: int) -> nn.Module:
    net = make_model()
    net.register_buffer("seen", torch.zeros(1 + rank % 2))
    return net


def transposed(rank: int) -> nn.Module:
    net = make_model()
    if rank % 2:
        net[0].weight.data = net[0].weight.data.t().contiguous().t()
    return net


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            frozen,
            "parameter 4.weight is of shape (3, 3) and torch.float32 on rank 0 and of shape (4, 3) and "
            "torch.float32 on rank 1: give all ranks the same",
        ),
        (buffered, "buffer seen is of shape (1,) and torch.float32 on rank 0 and of shape (2,)"),
        (transposed, "torch.float64 on rank 0 and of shape (7, 5) and torch.float64 and strides (1, 7) on"),
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_ranks_whose_models_differ_elsewhere_than_in_what_is_trained(
    run, n: int, make: Callable[[int], nn.Module], told: str
) -> None:
    def wrap(world: Communicator) -> str:
        net = make(world.rank)
        trained = [p for p in net.parameters() if p.requires_grad]
        with pytest.raises(JobError) as error:
            DistributedOptimizer(optim.SGD(trained, 0.1), net, form(world), bsp())
        return str(error.value)

    messages = run(n, wrap)
    assert messages[0].startswith("ranks 0 and 1 differ: ")
    if n == 4:
        told = told.replace("on rank 0", "on ranks 0, 2").replace("on rank 1", "on ranks 1, 3")
    assert told in messages[0]
    assert set(messages) == {messages[0]}
