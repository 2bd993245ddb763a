"""Buffers and frozen parameters of any kind are broadcast at the start, averaged or left alone, and saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.buffers import make_writable
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError, UserError


def drawn(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def inferred(rank: int) -> Tensor:
    with torch.inference_mode():
        return drawn(rank, 4, 5) * 1


def compressed(rank: int, layout: torch.layout) -> Tensor:
    x = drawn(rank, 4, 6).clamp(min=0)
    blocks = (2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that these layouts are in beta
        return x.to_sparse(layout=layout, blocksize=blocks)


AVERAGED: dict[str, Callable[[int], Tensor]] = {
    "float64": lambda rank: drawn(rank, 4, 5),
    "bfloat16": lambda rank: drawn(rank, 4, 5).bfloat16(),
    "float8_e4m3fn": lambda rank: drawn(rank, 4, 5).to(torch.float8_e4m3fn),
    "float8_e5m2fnuz": lambda rank: drawn(rank, 4, 5).to(torch.float8_e5m2fnuz),
    "complex64": lambda rank: torch.complex(drawn(rank, 7), drawn(rank + 9, 7)).to(torch.complex64),
    "complex128": lambda rank: torch.complex(drawn(rank, 7), drawn(rank + 9, 7)),
    "conjugated": lambda rank: torch.complex(drawn(rank, 7), drawn(rank + 9, 7)).conj(),
    "expanded": lambda rank: drawn(rank, 1, 5).expand(4, 5),
    "overlapping": lambda rank: drawn(rank, 9).unfold(0, 3, 1),
    "transposed": lambda rank: drawn(rank, 4, 5).t(),
    "a part of another": lambda rank: drawn(rank, 8, 5)[2:6],
    "one number": lambda rank: drawn(rank, 1)[0],
    "empty": lambda rank: drawn(rank, 0, 5),
    "of inference mode": inferred,
}
OWN: dict[str, Callable[[int], Tensor]] = {
    "int64": lambda rank: (drawn(rank, 4, 5) * 10).long(),
    "uint16": lambda rank: (drawn(rank, 4, 5).abs() * 10).int().to(torch.uint16),
    "bool": lambda rank: drawn(rank, 4, 5) > 0,
    "coordinates": lambda rank: drawn(rank, 4, 6).clamp(min=0).to_sparse_coo(),
    "csr": lambda rank: compressed(rank, torch.sparse_csr),
    "csc": lambda rank: compressed(rank, torch.sparse_csc),
    "bsr": lambda rank: compressed(rank, torch.sparse_bsr),
}
KINDS = AVERAGED | OWN


class Net(nn.Module):
    def __init__(self, buffer: Tensor, frozen: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.b: Tensor
        self.register_buffer("b", buffer)
        self.same = nn.Module()
        self.same.register_buffer("again", self.b)
        self.frozen = nn.Parameter(frozen.clone() if frozen.is_inference() else frozen, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def wrapped(world: Communicator, groups: int, kind: str) -> tuple[Net, Any]:
    net = Net(KINDS[kind](world.rank), KINDS[kind](world.rank + 50))
    inner = optim.SGD(net.linear.parameters(), lr=0.1)
    return net, hpcsgd.DistributedOptimizer(inner, net, form(world, groups), hpcsgd.hierarchical(2))


def bits(x: Tensor) -> list[Any]:
    if x.layout != torch.strided:
        x = x.to_dense()
    x = x.resolve_conj().clone(memory_format=torch.contiguous_format)
    return x.reshape(-1).view(torch.uint8).tolist()


def become(buffer: Tensor, kind: str, rank: int) -> None:
    """Change the buffer as a forward pass would, differently on each rank."""
    made = KINDS[kind](rank + 100)
    if buffer.layout == torch.strided:
        buffer.copy_(made)
    else:
        buffer.data = made


@pytest.mark.ranks(2)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_all_start_with_those_of_rank_0(run, kind: str, groups: int) -> None:
    def body(world: Communicator) -> list[Any]:
        net, _ = wrapped(world, groups, kind)
        assert net.b is net.same.again
        return [bits(net.b), bits(net.frozen)]

    expected = [bits(KINDS[kind](0)), bits(KINDS[kind](50))]
    assert list(run(2, body)) == [expected] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_inside_averaged_and_then_as_before(run, kind: str) -> None:
    def body(world: Communicator) -> tuple[list[Any], list[Any], list[Any]]:
        net, optimizer = wrapped(world, 2, kind)
        become(net.b, kind, world.rank)
        before, mine = net.b, bits(net.b)
        with optimizer.averaged_model():
            inside = bits(net.b)
        assert net.b is before
        return mine, inside, bits(net.b)

    mine, inside, after = zip(*run(2, body), strict=True)
    assert after == mine
    if kind in OWN:
        assert inside == mine
        return
    made = [KINDS[kind](rank + 100) for rank in range(2)]
    wide = torch.complex128 if made[0].is_complex() else torch.float64
    mean = (made[0].to(wide) + made[1].to(wide)) / 2
    assert inside[0] == inside[1]
    assert inside[0] == bits(mean.to(made[0].dtype))


@pytest.mark.threads
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_saved_with_the_model(tmp_path: Path, kind: str) -> None:
    def save(world: Communicator) -> list[Any]:
        net, optimizer = wrapped(world, 2, kind)
        become(net.b, kind, world.rank)
        hpcsgd.save(tmp_path, optimizer)
        return [bits(net.b), bits(net.frozen)]

    def load(world: Communicator) -> list[Any]:
        net, optimizer = wrapped(world, min(2, world.size), kind)
        become(net.b, kind, world.rank + 7)
        hpcsgd.load(tmp_path, optimizer)
        return [bits(net.b), bits(net.frozen)]

    saved = threads.run(2, save)
    assert threads.run(2, load) == saved
    ((buffer, frozen),) = threads.run(1, load)
    assert frozen == saved[0][1]
    if kind in OWN:
        assert buffer == saved[0][0]
    else:
        made = [KINDS[kind](rank + 100) for rank in range(2)]
        wide = torch.complex128 if made[0].is_complex() else torch.float64
        assert buffer == bits(((made[0].to(wide) + made[1].to(wide)) / 2).to(made[0].dtype))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_ones_are_shared_and_saving_them_is_refused(tmp_path: Path) -> None:
    def body(world: Communicator) -> list[float]:
        net = Net(torch.quantize_per_tensor(drawn(world.rank, 5).float(), 0.1, 0, torch.qint8), drawn(0, 1))
        inner = optim.SGD(net.linear.parameters(), lr=0.1)
        optimizer = hpcsgd.DistributedOptimizer(inner, net, form(world, 2), hpcsgd.hierarchical(2))
        with pytest.raises(JobError, match="b: a quantized tensor cannot be saved in a checkpoint"):
            hpcsgd.save(tmp_path, optimizer)
        return net.b.dequantize().tolist()

    first, second = threads.run(2, body)
    assert first == second


def test_kinds_that_differ_between_ranks_are_reported() -> None:
    def body(world: Communicator) -> None:
        net = Net(drawn(0, 4, 6) if world.rank else drawn(0, 4, 6).to_sparse_coo(), drawn(0, 1))
        hpcsgd.DistributedOptimizer(
            optim.SGD(net.linear.parameters(), lr=0.1), net, form(world, 1), hpcsgd.bsp()
        )

    with pytest.raises(JobError, match=r"buffer b is of shape .* and torch\.sparse_coo on rank 0"):
        threads.run(2, body)


class Quantizer(nn.Module):
    """A codebook that follows the samples of a rank, and a queue of the last samples with its pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(drawn(number, *param.shape))
        self.codebook: Tensor
        self.queue: Tensor
        self.pointer: Tensor
        self.seen: Tensor
        self.register_buffer("codebook", torch.zeros(3).double())
        self.register_buffer("queue", torch.zeros(5, 3, dtype=torch.bfloat16))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(3, 3).to_sparse_coo())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.codebook.lerp_(x.mean(0), 0.3)
            self.queue[int(self.pointer)] = x[0]
            self.pointer.add_(1 + (x.sum() > 0)).remainder_(5)
            self.seen = self.seen + torch.eye(3).mul(x.abs().sum().float()).to_sparse_coo()
        return self.linear(x) * self.codebook

    def buffer_bits(self) -> list[list[Any]]:
        return [bits(x) for x in self.buffers()]


@pytest.mark.parametrize(("P", "K"), [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_group_goes_on_from_the_buffers_of_its_first_rank(run, P: int, K: int, prefetch: bool) -> None:
    def body(world: Communicator) -> list[list[Any]]:
        net = Quantizer()
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1), net, form(world, P), hpcsgd.hierarchical(2),
            broadcast_buffers=True, overlap_param_gather=prefetch,
        )  # fmt: skip
        for t in range(5):
            net(drawn(10 * t + world.rank, 4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.buffer_bits()

    found = list(run(P * K, body))
    for rank, mine in enumerate(found):
        first, alone = rank // K * K, Quantizer()
        for t in range(5):
            alone(drawn(10 * t + first, 4, 3))
        assert mine == alone.buffer_bits(), rank


def test_an_expanded_buffer_of_a_forward_pass_is_broadcast() -> None:
    """All elements of an expanded buffer share one place in memory, so it cannot be written in place."""

    def body(world: Communicator) -> list[float]:
        net = Quantizer()
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1), net, form(world, 1), hpcsgd.bsp(), broadcast_buffers=True
        )
        net.codebook = torch.full((1,), 1.0 + world.rank).double().expand(3)
        net.linear(drawn(1, 4, 3)).sum().backward()
        optimizer.step()
        return net.codebook.tolist()

    assert threads.run(2, body) == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "made",
    [torch.zeros(2, 3), torch.zeros(3, 2).T, torch.zeros(4, 6)[:, ::2], torch.zeros(1, 3), torch.zeros(())],
    ids=["contiguous", "transposed", "with gaps", "one row", "a number"],
)
def test_a_buffer_that_can_be_written_stays_where_it_is(made: Tensor) -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("b", made)
    make_writable(net)
    assert net.b is made


def test_ranks_with_other_buffers_are_reported_before_any_is_overwritten() -> None:
    def body(world: Communicator) -> None:
        net = Quantizer()
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1), net, form(world, 1), hpcsgd.bsp(), broadcast_buffers=True
        )
        if world.rank:
            net.codebook = torch.zeros(4).double()
        net.linear(drawn(1, 4, 3)).sum().backward()
        with pytest.raises(
            UserError, match=r"models differ between ranks: \d+ elements of buffers in rank 0, "
        ):
            optimizer.step()
        assert net.codebook.sum() == 0

    threads.run(2, body)
