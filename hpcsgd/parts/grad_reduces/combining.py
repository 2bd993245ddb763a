"""How the workers' selections become one: whose values count at which indices."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcsgd.comm import Communicator, phase
from hpcsgd.parts.grad_reduces.codecs import Codec


@dataclass(frozen=True)
class Selected:
    """By one worker, of its acc (M elements)."""

    acc: Tensor
    mine: Tensor
    """Indices, int64, ascending."""
    code: Tensor
    """They as they travel, uint8."""
    leader: int | None
    """Whose selection counts for all; None: everybody's."""
    squared_norm: Tensor
    """Of acc, float64, one element."""
    disjoint: bool = False
    """Whether no two workers ever select the same element."""


@dataclass(frozen=True)
class Combined:
    """The same on all workers, but for `sent`."""

    joint: Tensor
    """Indices, int64, ascending: the union."""
    mean: Tensor
    """Over the workers, at the joint indices."""
    errors: Tensor
    """Of which the mean is that over the workers of ‖e‖₂, of what they have left (eq. 2)."""
    sent: Tensor
    """Indices of what this worker gave, which is no longer part of its acc."""
    growth: float
    """Joint indices for each that a worker selected on the mean."""


Combine = Callable[[Selected, Codec, Communicator], Combined]


def union(x: Selected, codec: Codec, workers: Communicator) -> Combined:
    """Every worker gives its values at all joint indices: DEFT's algorithm 1, lines 7 to 9.

    Sends the own indices to n−1 others and 2·(n−1)/n values for each joint index.
    """
    runs = _of_leader(x, codec, workers) if x.leader is not None else _of_all(x, codec, workers)
    joint = joint_indices(runs, x.disjoint)
    values = x.acc[joint]
    mean = mean_over(torch.cat([values, _left(x, values)]), workers)
    return Combined(joint, mean[:-1], mean[-1:], joint, _growth(joint, runs))


def per_worker(x: Selected, codec: Codec, workers: Communicator) -> Combined:
    """Every worker gives its values at its own indices alone, the others count as zero and are kept.

    The usual way of Top-k (A. Aji, K. Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP
    2017). Sends n−1 times its own indices and values: half of what `union` sends where selections have
    little in common.
    """
    n, runs = workers.size, _of_all(x, codec, workers)
    values = x.acc[x.mine]
    counts = [run.numel() + 1 for run in runs]
    gathered = values.new_empty(sum(counts))
    with phase("values"):
        workers.allgatherv(gathered, torch.cat([values, _left(x, values)]), counts).wait()
    joint = joint_indices(runs)
    total, errors = values.new_zeros(joint.numel()), []
    for run, theirs in zip(runs, gathered.split(counts), strict=True):
        total[torch.searchsorted(joint, run)] += theirs[:-1]
        errors.append(theirs[-1])
    return Combined(joint, total.div_(n), torch.stack(errors), x.mine, _growth(joint, runs))


COMBINING: Mapping[str, Combine] = {"union": union, "per_worker": per_worker}
"""As job files call them."""


def joint_indices(runs: Sequence[Tensor], disjoint: bool = False) -> Tensor:
    """Ascending, each once, of ascending ones. How many there are of disjoint ones need not be counted."""
    if len(runs) == 1:
        return runs[0]
    joined = torch.cat(list(runs))
    return joined.sort().values if disjoint else joined.unique()


def _growth(joint: Tensor, runs: Sequence[Tensor]) -> float:
    selected = sum(run.numel() for run in runs)
    return joint.numel() * len(runs) / selected if selected else 1.0


def mean_over(values: Tensor, workers: Communicator) -> Tensor:
    """Over the workers, in rank order, so that the bits are the same everywhere and every time."""
    n = workers.size
    padded = torch.nn.functional.pad(values, (0, -values.numel() % n))
    received, means = torch.empty_like(padded), torch.empty_like(padded)
    with phase("values"):
        workers.alltoall(received, padded).wait()
        workers.allgather(means, received.view(n, -1).mean(0)).wait()
    return means[: values.numel()]


def _left(x: Selected, given: Tensor) -> Tensor:
    """‖e‖₂ once these values are gone, as one element.

    0 where it is below some 10⁻⁶ of ‖acc‖ (2.4 at M = 10⁷): there the difference of two sums cannot be told
    from their rounding, and another look at all of acc is not worth it. In n steps at random they would be √n
    roundings apart; the kernels' sums are nearer to each other, of any M.
    """
    squared = x.squared_norm - given.double().square().sum()
    rounding = 8 * math.sqrt(x.acc.numel()) * sys.float_info.epsilon * x.squared_norm
    return squared.masked_fill(squared < rounding, 0).sqrt().to(given.dtype).reshape(1)


def _of_all(x: Selected, codec: Codec, workers: Communicator) -> list[Tensor]:
    sizes = torch.empty(2 * workers.size, dtype=torch.int64, device="cpu")
    mine = torch.tensor([x.code.numel(), x.mine.numel()], device="cpu")  # for the host, from end to end
    with phase("indices"):
        workers.allgather(sizes, mine).wait()
        lengths, counts = sizes.view(-1, 2).T.tolist()
        codes = x.code.new_empty(sum(lengths))
        workers.allgatherv(codes, x.code, lengths).wait()
    return [codec.decode(*each) for each in zip(codes.split(lengths), counts, strict=True)]


def _of_leader(x: Selected, codec: Codec, workers: Communicator) -> list[Tensor]:
    assert x.leader is not None
    code = x.code
    sizes = torch.tensor([code.numel(), x.mine.numel()], device="cpu")
    with phase("indices"):
        workers.bcast(sizes, x.leader).wait()
        length, count = sizes.tolist()
        if workers.rank != x.leader:
            code = code.new_empty(length)
        workers.bcast(code, x.leader).wait()
    return [codec.decode(code, count)]
