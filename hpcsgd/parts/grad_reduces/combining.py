"""Combine the elements that workers selected from their gradients into one sparse mean gradient.

The functions differ in which workers' values count at which indices.
"""

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
    """The elements that one worker selected from its accumulated gradient acc, a vector of M elements."""

    acc: Tensor
    mine: Tensor
    """The indices that this worker selected, int64, ascending."""
    code: Tensor
    """The indices `mine` as the codec encodes them, uint8."""
    leader: int | None
    """The worker whose selection counts for all; None if each worker's own selection counts."""
    squared_norm: Tensor
    """The squared norm of acc, float64, one element."""
    disjoint: bool = False
    """True if the sparsifier guarantees that no two workers select the same element."""


@dataclass(frozen=True)
class Combined:
    """The combined selections of all workers; all fields except `sent` are the same on all workers."""

    joint: Tensor
    """The joint indices: the union of those that workers selected, int64, ascending."""
    mean: Tensor
    """The mean of the values over the workers, at the joint indices."""
    errors: Tensor
    """Values whose mean is the mean over the workers of ‖e‖₂ (eq. 2); e is what a worker has not sent."""
    sent: Tensor
    """The indices of the values that this worker sent and has to remove from its acc."""
    counts: Sequence[int]
    """The number of indices that each worker selected, in rank order; of one leader, its own alone."""

    @property
    def growth(self) -> float:
        """The number of joint indices, divided by the mean number of indices that a worker selected."""
        selected = sum(self.counts)
        return self.joint.numel() * len(self.counts) / selected if selected else 1.0

    @property
    def imbalance(self) -> float:
        """The largest number of indices that a worker selected, divided by the mean number."""
        selected = sum(self.counts)
        return max(self.counts) * len(self.counts) / selected if selected else 1.0


Combine = Callable[[Selected, Codec, Communicator], Combined]
"""A function that combines this worker's selection with those of all workers. Collective."""


def union(x: Selected, codec: Codec, workers: Communicator) -> Combined:
    """Combine so that every worker's values count at all joint indices (DEFT, algorithm 1, lines 7 to 9).

    A worker sends its own indices to n−1 others, and 2·(n−1)/n values for each joint index.
    """
    runs = _of_leader(x, codec, workers) if x.leader is not None else _of_all(x, codec, workers)
    joint = joint_indices(runs, x.disjoint)
    values = x.acc[joint]
    mean = mean_over(torch.cat([values, _left(x, values)]), workers)
    return Combined(joint, mean[:-1], mean[-1:], joint, _counts(runs))


def per_worker(x: Selected, codec: Codec, workers: Communicator) -> Combined:
    """Combine so that every worker's values count only at the indices that it selected itself.

    At the other joint indices a worker counts as zero and keeps its values for later. This is usual for Top-k
    (A. Aji, K. Heafield: Sparse Communication for Distributed Gradient Descent, EMNLP 2017). A worker sends
    its own indices and values to n−1 others: half of what `union` sends if selections have little in common.
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
    return Combined(joint, total.div_(n), torch.stack(errors), x.mine, _counts(runs))


COMBINING: Mapping[str, Combine] = {"union": union, "per_worker": per_worker}
"""The values of `combine`, by their names in job files."""


def joint_indices(runs: Sequence[Tensor], disjoint: bool = False) -> Tensor:
    """Return the union of the ascending index vectors `runs`, ascending.

    If the vectors are `disjoint`, they are only joined and sorted, because no index occurs twice.
    """
    if len(runs) == 1:
        return runs[0]
    joined = torch.cat(list(runs))
    return joined.sort().values if disjoint else joined.unique()


def _counts(runs: Sequence[Tensor]) -> list[int]:
    return [run.numel() for run in runs]


def mean_over(values: Tensor, workers: Communicator) -> Tensor:
    """Return the mean of `values` over the workers, summed in rank order: the same bits on all ranks."""
    n = workers.size
    padded = torch.nn.functional.pad(values, (0, -values.numel() % n))
    received, means = torch.empty_like(padded), torch.empty_like(padded)
    with phase("values"):
        workers.alltoall(received, padded).wait()
        workers.allgather(means, received.view(n, -1).mean(0)).wait()
    return means[: values.numel()]


def _left(x: Selected, given: Tensor) -> Tensor:
    """Return, as a tensor of one element, the norm ‖e‖₂ of acc after the values `given` are removed from it.

    ‖e‖² is computed as ‖acc‖² minus the squared norm of `given`, which avoids a second pass over acc. A
    result below about 10⁻⁶ of ‖acc‖ (2.4·10⁻⁶ at M = 10⁷) is returned as 0, because this difference could be
    due to rounding alone. The bound assumes that M random rounding errors add up to √M times one of them. The
    kernels' sums are more exact than that, for any M.
    """
    squared = x.squared_norm - given.double().square().sum()
    rounding = 8 * math.sqrt(x.acc.numel()) * sys.float_info.epsilon * x.squared_norm
    return squared.masked_fill(squared < rounding, 0).sqrt().to(given.dtype).reshape(1)


def _of_all(x: Selected, codec: Codec, workers: Communicator) -> list[Tensor]:
    sizes = torch.empty(2 * workers.size, dtype=torch.int64, device="cpu")
    mine = torch.tensor([x.code.numel(), x.mine.numel()], device="cpu")  # the hosts need these numbers
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
