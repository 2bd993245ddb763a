"""A small test, with known results, of whether a library moves and sums device tensors correctly."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.comm.backend import Backend

_LENGTH = 1000  # elements for each rank


def fault(ranks: Backend, device: torch.device) -> str:
    """Return which operations give wrong results on this rank for tensors on `device`; empty if none.

    Collective. These are the library's first operations, in which it connects the ranks.
    """
    checks = {"alltoall": _alltoall, "allreduce": _allreduce, "sendrecv": _sendrecv}
    wrong = [name for name, right in checks.items() if not right(ranks, device)]
    return f"{', '.join(wrong)} arrived wrong from {ranks.name}" if wrong else ""


def _numbers(number: int) -> Tensor:
    """Return float32 [_LENGTH] numbers that differ for each `number`, so that a wrong sender is noticed."""
    return ((torch.arange(_LENGTH, device="cpu") * 3 + number) % 101).float()


def _alltoall(ranks: Backend, device: torch.device) -> bool:
    sent = torch.cat([_numbers(ranks.rank + to) for to in range(ranks.size)]).to(device)
    received = torch.zeros_like(sent)
    ranks.alltoall(received, sent)
    return torch.equal(received.cpu(), torch.cat([_numbers(i + ranks.rank) for i in range(ranks.size)]))


def _allreduce(ranks: Backend, device: torch.device) -> bool:
    x = _numbers(ranks.rank).to(device)
    ranks.allreduce(x, "sum")
    return torch.equal(x.cpu(), torch.stack([_numbers(i) for i in range(ranks.size)]).sum(0))


def _sendrecv(ranks: Backend, device: torch.device) -> bool:
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    received = torch.zeros(_LENGTH, device=device)
    ranks.sendrecv({after: _numbers(ranks.rank).to(device)}, {before: received})
    return torch.equal(received.cpu(), _numbers(before))
