"""Operations for which MPI would silently give wrong results are refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpcsgd.comm import Communicator, Work

N = 2
four, shared = torch.zeros(4), torch.zeros(6)

REFUSED: dict[str, tuple[Callable[[Communicator], Work], str]] = {
    "not contiguous": (lambda t: t.allreduce(torch.zeros(2, 3).t()), r"strides \(1, 3\).*only contiguous"),
    "every second element": (lambda t: t.bcast(torch.zeros(6)[::2]), "only contiguous"),
    "requires grad": (lambda t: t.allreduce(torch.zeros(4, requires_grad=True)), r"send its \.detach\(\)"),
    "complex": (lambda t: t.bcast(torch.zeros(4, dtype=torch.complex64)), "complex64: complex tensors"),
    "another device": (lambda t: t.bcast(torch.zeros(4, device="meta")), "on meta: .* cannot send it"),
    "int16 sum": (
        lambda t: t.allreduce(torch.zeros(4, dtype=torch.int16)),
        "int16 cannot be reduced; allowed",
    ),
    "int8 sum": (lambda t: t.allreduce(torch.zeros(4, dtype=torch.int8)), "int8 cannot be reduced; allowed"),
    "uint8 sum": (
        lambda t: t.allreduce(torch.zeros(4, dtype=torch.uint8)),
        "uint8 cannot be reduced; allowed: bfloat16, float16, float32, float64, int32, int64$",
    ),
    "bool max": (lambda t: t.allreduce(torch.zeros(4, dtype=torch.bool), "max"), "bool cannot be reduced"),
    "int16 reduce_scatter": (
        lambda t: t.reduce_scatter(torch.zeros(2, dtype=torch.int16), torch.zeros(4, dtype=torch.int16)),
        "int16 cannot be reduced",
    ),
    "two types": (
        lambda t: t.alltoall(torch.zeros(4), torch.zeros(4).half()),
        "float16 with torch.float32",
    ),
    "alltoall in place": (lambda t: t.alltoall(four, four), "share memory"),
    "overlapping runs": (lambda t: t.alltoall(shared[:4], shared[2:]), "share memory"),
    "allgather into itself at the wrong place": (
        lambda t: t.allgather(four, four[2 - 2 * t.rank :][:2]),
        "share memory",
    ),
    "allgatherv in place": (
        lambda t: t.allgatherv(four, four[2 * t.rank :][:2], [2, 2]),
        "share memory",
    ),
    "alltoall of an odd number": (
        lambda t: t.alltoall(torch.zeros(5), torch.zeros(5)),
        "5 elements over 2 ranks",
    ),
    "alltoall of two sizes": (lambda t: t.alltoall(torch.zeros(6), torch.zeros(4)), "4 elements into 6"),
    "reduce_scatter size": (
        lambda t: t.reduce_scatter(torch.zeros(3), torch.zeros(4)),
        "reduce_scatter of 4 into 3",
    ),
    "allgather size": (lambda t: t.allgather(torch.zeros(5), torch.zeros(2)), "allgather of 2 into 5"),
    "allgatherv own count": (
        lambda t: t.allgatherv(torch.zeros(4), torch.zeros(2), [1, 3] if t.rank == 0 else [3, 1]),
        r"allgatherv of 2 into 4 with counts \[",
    ),
    "allgatherv counts": (lambda t: t.allgatherv(torch.zeros(4), torch.zeros(2), [2, 2, 0]), "with counts"),
    "allgatherv total": (lambda t: t.allgatherv(torch.zeros(5), torch.zeros(2), [2, 2]), "2 into 5"),
    "exchange of a graph's tensor": (
        lambda t: t.sendrecv({0: torch.zeros(1, requires_grad=True)}, {}),
        "detach",
    ),
    "exchange into a transposed one": (lambda t: t.sendrecv({}, {0: torch.zeros(2, 3).t()}), "contiguous"),
    "send": (lambda t: t.send(torch.zeros(4)[::2], 0), "contiguous"),
    "recv": (lambda t: t.recv(torch.zeros(4)[::2], 0), "contiguous"),
}


@pytest.mark.ranks(N)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_sent(run, case: str) -> None:
    call, message = REFUSED[case]

    def attempt(world: Communicator) -> int:
        with pytest.raises(ValueError, match=message):
            call(world)
        return len(world.stats.totals())

    assert run(N, attempt) == [0, 0]


@pytest.mark.ranks(N)
def test_after_a_refusal_the_communicator_goes_on(run) -> None:
    def attempt(world: Communicator) -> float:
        with pytest.raises(ValueError, match="contiguous"):
            world.allreduce(torch.zeros(2, 3).t())
        x = torch.ones(1)
        world.allreduce(x).wait()
        return x.item()

    assert run(N, attempt) == [2.0, 2.0]
