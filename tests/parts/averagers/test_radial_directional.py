"""Radial-directional averaging: its definition, tensors cut over ranks, and which tensors it leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, diloco, ensemble_sync, streaming
from hpcsgd.parts.quantizers import int8
from methods.table import replica_groups
from radial import merged, radial_directional

MERGE = hpcsgd.RadialDirectional()
GUARD = hpcsgd.PseudoGradientPenalty()


def stays(ws: Sequence[Tensor]) -> optim.Optimizer:
    """Return the outer optimizer that moves a model by exactly the average."""
    return optim.SGD(ws, lr=1.0)


def in_one_job(merge: hpcsgd.RadialDirectional = MERGE) -> Method:
    return diloco(1, stays, merge=merge)


def of_groups_that_may_die(merge: hpcsgd.RadialDirectional = MERGE) -> Method:
    return ensemble_sync(1, outer=stays, merge=merge)


KINDS: dict[str, tuple[Callable[..., Method], Callable[..., Any]]] = {
    "diloco": (in_one_job, form),
    "ensemble_sync": (of_groups_that_may_die, replica_groups),
}
PRIME = (7, 11)
"""The shape of a matrix that three ranks cannot cut evenly."""


class Tensors(nn.Module):
    """A model that is only a matrix of 7 × 11 and a vector of 5."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix, self.vector = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
            for shape in (PRIME, (5,))
        )


Changes = Mapping[str, Tensor]


def moved(
    world: Communicator,
    P: int,
    changes: Sequence[Changes],
    new: Callable[[], Method] = in_one_job,
    net: nn.Module | None = None,
    form: Callable[..., Any] = form,
    **options: Any,
) -> dict[str, Tensor]:
    """Change group g by `changes[g]`, synchronize, and return how each tensor has moved then."""
    topology = form(world, P)
    net = net or Tensors()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = hpcsgd.DistributedOptimizer(
        optim.SGD(net.parameters(), lr=1.0), net, topology, new(), **options
    )
    g = world.rank // topology.group_size
    for name, p in net.named_parameters():
        if name in changes[g]:
            p.grad = -changes[g][name].to(p.dtype).clone()
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in net.named_parameters()}


def same_on_all(found: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    for other in found[1:]:
        for name, x in found[0].items():
            assert torch.equal(x, other[name]), f"{name} differs between ranks"
    return found[0]


def randoms(P: int, **shapes: Sequence[int]) -> list[Changes]:
    generator = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
        for _ in range(P)
    ]


def matrices(*changes: Tensor) -> list[Changes]:
    return [{"matrix": x} for x in changes]


@pytest.mark.parametrize("M", [2, 4, 16])
def test_the_definition(M: int) -> None:
    """The reference has the paper's properties; the tests below compare averagers with it."""
    generator = torch.Generator().manual_seed(0)
    q = 3 * torch.linalg.qr(torch.randn(256, M, generator=generator, dtype=torch.float64))[0].T
    assert radial_directional([*q]).norm().item() == pytest.approx(3)
    assert q.mean(0).norm().item() == pytest.approx(3 / M**0.5)
    torch.testing.assert_close(radial_directional([q[0]] * M, [1.0 + m for m in range(M)]), q[0])
    torch.testing.assert_close(radial_directional([*(2 * q)]), 2 * radial_directional([*q]))
    torch.testing.assert_close(radial_directional([q[0], -3 * q[0]]), -q[0])


@pytest.mark.threads(unless={"K": 3})
@pytest.mark.parametrize(("P", "K"), [(2, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_cut_over_ranks(run, kind: str, P: int, K: int) -> None:
    """Norms are those of whole tensors, of any size and in any number of buckets."""
    new, shape = KINDS[kind]
    changes = randoms(P, matrix=PRIME, vector=(5,))
    for cap in (None, 1e-5):
        body = lambda world, cap=cap: moved(world, P, changes, new, form=shape, bucket_cap_mb=cap)  # noqa: E731
        found = same_on_all(run(P * K, body))
        for name in ("matrix", "vector"):
            expected = merged([x[name] for x in changes], plain=False)
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-13)


def orthogonal(P: int) -> list[Tensor]:
    q = torch.linalg.qr(torch.randn(77, P, generator=torch.Generator().manual_seed(2)).double())[0]
    return [3 * x.reshape(PRIME) for x in q.T]


@pytest.mark.threads
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("P", [2, 4])
def test_the_norm_does_not_depend_on_the_number_of_groups(run, P: int, kind: str) -> None:
    new, shape = KINDS[kind]
    found = same_on_all(run(P, lambda world: moved(world, P, matrices(*orthogonal(P)), new, form=shape)))
    assert found["matrix"].norm().item() == pytest.approx(3)


@pytest.mark.threads
@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("factors", "mean"), [((1, 1, 1), 1.0), ((1, 2, 6), 3.0), ((0, 2, 4), 2.0)])
def test_vectors_of_one_direction(run, kind: str, factors: Sequence[float], mean: float) -> None:
    """The result is their mean; a group that has not moved has no direction, and its norm counts."""
    new, shape = KINDS[kind]
    (v,) = orthogonal(1)
    found = same_on_all(
        run(3, lambda world: moved(world, 3, matrices(*(a * v for a in factors)), new, form=shape))
    )
    torch.testing.assert_close(found["matrix"], mean * v, rtol=0, atol=1e-13)


@pytest.mark.threads(unless={"K": 3})
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_that_cancel_take_the_mean(run, P: int, K: int, dtype: torch.dtype) -> None:
    """Also if rounding leaves something of their sum, and while another tensor does not cancel."""
    (v,) = orthogonal(1)
    other = randoms(2, other=(3, 4))

    def body(world: Communicator) -> dict[str, Tensor]:
        net = Tensors(dtype)
        net.other = nn.Parameter(torch.zeros(3, 4, dtype=dtype))
        with torch.no_grad():
            net.matrix.zero_()
        changes = [{"matrix": a * v, **other[g]} for g, a in enumerate((1, -3))]
        return moved(world, 2, changes, net=net)

    found = same_on_all(run(P * K, body))
    atol = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found["matrix"].double(), -v, rtol=0, atol=atol)
    expected = radial_directional([x["other"] for x in other])
    torch.testing.assert_close(found["other"].double(), expected, rtol=0, atol=atol)


@pytest.mark.threads
@pytest.mark.ranks(2)
def test_directions_that_cancel_among_groups_that_may_die(run) -> None:
    """Their tensor does not move, and all others do."""
    new, shape = KINDS["ensemble_sync"]
    (v,) = orthogonal(1)
    changes = [{"matrix": a * v, "vector": torch.full((5,), a)} for a in (1.0, -3.0)]
    found = same_on_all(run(2, lambda world: moved(world, 2, changes, new, form=shape)))
    assert not found["matrix"].any()
    torch.testing.assert_close(found["vector"], torch.full((5,), -1.0).double())


@pytest.mark.threads
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [1, 2])
def test_a_change_that_is_not_finite_shows(run, kind: str, broken: int) -> None:
    """The tensor is NaN in all groups, and others are averaged as usual."""
    new, shape = KINDS[kind]
    (v,) = orthogonal(1)
    changes = [{"matrix": v.clone(), "vector": torch.full((5,), a)} for a in (1.0, 2.0)]
    for change in changes[:broken]:
        change["matrix"].view(-1)[0] = math.inf
    for found in run(2, lambda world: moved(world, 2, changes, new, form=shape)):
        assert found["matrix"].isnan().all()
        torch.testing.assert_close(found["vector"], torch.full((5,), 1.5).double())


@pytest.mark.threads
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_it_is_homogeneous(run, kind: str, factor: float) -> None:
    new, shape = KINDS[kind]

    def of(changes: Sequence[Changes]) -> Tensor:
        def body(world: Communicator) -> dict[str, Tensor]:
            net = Tensors()
            with torch.no_grad():
                net.matrix.zero_()
            return moved(world, 2, changes, new, net, shape)

        return same_on_all(run(2, body))["matrix"]

    changes = randoms(2, matrix=PRIME)
    scaled = [{"matrix": factor * x["matrix"]} for x in changes]
    torch.testing.assert_close(of(scaled), factor * of(changes))


@pytest.mark.threads
@pytest.mark.ranks(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits(run, kind: str, dtype: torch.dtype) -> None:
    """Directions travel in float32, so only the result is rounded to 16 bits."""
    new, shape = KINDS[kind]
    changes = [{name: x.to(dtype).double() for name, x in each.items()} for each in randoms(3, matrix=PRIME)]

    def body(world: Communicator) -> dict[str, Tensor]:
        net = Tensors(dtype)
        with torch.no_grad():
            net.matrix.zero_()
        return moved(world, 3, changes, new, net, shape)

    found = same_on_all(run(6, body))
    expected = radial_directional([x["matrix"] for x in changes]).to(dtype)
    torch.testing.assert_close(found["matrix"], expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.threads
@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_nobody_uses(run, kind: str) -> None:
    """A tensor that no group has moved stays, without a NaN."""
    new, shape = KINDS[kind]
    changes = [{"vector": x["vector"]} for x in randoms(2, vector=(5,))]
    found = same_on_all(run(4, lambda world: moved(world, 2, changes, new, form=shape)))
    assert not found["matrix"].any()
    assert found["vector"].any()


@pytest.mark.threads
@pytest.mark.ranks(4)
def test_buffers_of_groups_that_may_die_take_the_mean(run) -> None:
    new, shape = KINDS["ensemble_sync"]

    def body(world: Communicator) -> Tensor:
        net = Tensors()
        net.register_buffer("seen", torch.zeros(3))
        inner = optim.SGD(net.parameters(), lr=1.0)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, shape(world, 2), new())
        net.get_buffer("seen").fill_(world.rank)
        optimizer.step()
        return net.get_buffer("seen")

    for seen in run(4, body):
        torch.testing.assert_close(seen, torch.full((3,), 1.5))


class Words(nn.Module):
    """A model with an embedding, an output layer that shares its weight, and a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.output = nn.Linear(5, 7)
        self.output.weight = self.words.weight
        self.places = nn.Parameter(torch.zeros(3, 5))
        self.layer = nn.Linear(5, 5)
        self.double()
        for p in self.parameters():
            nn.init.zeros_(p)


@pytest.mark.threads(unless={"K": 2})
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [(), "places", ["pl*", "layer.*"]])
def test_embeddings_and_vectors_take_the_plain_mean(run, names: Any, kind: str, P: int, K: int) -> None:
    shapes = {name: p.shape for name, p in Words().named_parameters()}
    generator = torch.Generator().manual_seed(3)
    changes = [
        {name: torch.randn(x, generator=generator).double() for name, x in shapes.items()} for _ in "ab"
    ]
    new, shape = KINDS[kind]
    merge = hpcsgd.RadialDirectional(plain_mean=names)

    def body(world: Communicator) -> dict[str, Tensor]:
        return moved(world, 2, changes, lambda: new(merge), Words(), shape)

    found = same_on_all(run(P * K, body))
    plain = {"words.weight", *(["places"] if names else []), *(["layer.weight"] if len(names) == 2 else [])}
    for name, x in found.items():
        expected = merged([each[name] for each in changes], plain=name in plain)
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)


@pytest.mark.threads
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_of_no_parameter(run, kind: str) -> None:
    merge = hpcsgd.RadialDirectional(["matrix", "wpe"])
    new, shape = KINDS[kind]

    def body(world: Communicator) -> str:
        with pytest.raises(UserError) as error:
            moved(world, 2, randoms(2, matrix=PRIME), lambda: new(merge), form=shape)
        return str(error.value)

    for told in run(2, body):
        assert told == "plain_mean: no trainable parameter of the model is called 'wpe'"


@pytest.mark.threads
@pytest.mark.ranks(2)
def test_a_name_of_no_parameter_is_reported_before_the_first_synchronization(run) -> None:
    """Training may go on for long until then."""
    merge = hpcsgd.RadialDirectional("wpe")

    def body(world: Communicator) -> None:
        with pytest.raises(UserError, match=r"^plain_mean: no trainable parameter .* 'wpe'$"):
            moved(world, 2, randoms(2, matrix=PRIME), lambda: diloco(4, stays, merge=merge))

    run(2, body)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: diloco(1, merge=MERGE, quantize=int8()), "cannot be combined with quantize"),
        (lambda: diloco(1, merge=MERGE, guard=GUARD), "cannot be combined with guard"),
        (lambda: ensemble_sync(1, guard=GUARD, outer=stays, merge=MERGE), "cannot be combined with guard"),
        (lambda: ensemble_sync(1, merge=MERGE), "needs an outer optimizer"),
    ],
)
def test_what_does_not_go_with_it(wrong: Callable[[], Method], said: str) -> None:
    with pytest.raises(UserError, match=f"^merge: it {said}") as error:
        wrong()
    assert error.value.about.key == ("merge",)


@pytest.mark.threads(unless={"K": 3})
@pytest.mark.parametrize(("P", "K"), [(2, 1), (2, 3)])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("cap", [None, 1e-5])
def test_fragments(run, P: int, K: int, delay: int, cap: float | None) -> None:
    """The part of a tensor in a fragment counts as a tensor; the result does not depend on K."""
    changes = randoms(2, matrix=PRIME, vector=(5,))
    none = {name: torch.zeros_like(x).double() for name, x in changes[0].items()}

    def body(world: Communicator) -> dict[str, Tensor]:
        topology, net = form(world, 2), Tensors()
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        method = streaming(diloco(4, stays, merge=MERGE), 2, delay, update_alpha=0.0)
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=1.0), net, topology, method, bucket_cap_mb=cap
        )
        for t in range(6):
            for name, p in net.named_parameters():
                p.grad = -(changes[topology.group_index] if t == 0 else none)[name].clone()
            optimizer.step()
        return {name: p.detach() - before[name] for name, p in net.named_parameters()}

    found = same_on_all(run(P * K, body))
    rows = [x["matrix"].reshape(-1) for x in changes]
    at = 41  # the first fragment has ⌈82/2⌉ numbers
    pieces = [radial_directional([x[:at] for x in rows]), radial_directional([x[at:] for x in rows])]
    torch.testing.assert_close(found["matrix"].reshape(-1), torch.cat(pieces), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["vector"], merged([x["vector"] for x in changes], plain=True))
