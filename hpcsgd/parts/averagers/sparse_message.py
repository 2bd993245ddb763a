"""The messages that groups send about each vector at a synchronization of `sparseloco`, and their mean.

Covenant-72B (arXiv:2603.08163) was trained by SparseLoCo with peers that anybody could run. Its code has two
rules that the paper of SparseLoCo has not, of which a training may use either or both. Group r sends the
values v_r of the elements S_r. In place of (1/R) Σ_r v_r:

    over senders      x_i = Σ_r v_ri / |{r : i ∈ S_r}|
    median norm       v_r ← v_r·min(1, median_s ‖v_s‖/‖v_r‖)      before the mean

Differences from this code:

- ‖v_r‖ is the norm of all that a group sends, not of each tensor. So it does not depend on the number of
  ranks in a group, or on the layout of the model in buckets.
- The median is that of the groups that send anything but zeros. Of an even number it is the lower one.
- What a group sends is left out if it is not finite; the code skips such tensors for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hpcsgd import kernels
from hpcsgd.arguments import checked
from hpcsgd.core.norm import squared_norm
from hpcsgd.core.topology import Topology
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.sparsifiers.base import Share


@dataclass(frozen=True)
class SparseMessage:
    """The format of the message about one vector: indices and values of the selected elements.

    `share` says how many elements of which block are selected, and so determines the size of the message.
    """

    share: Share
    values: Quantizer

    @property
    def count(self) -> int:
        return int(self.share.k.sum())

    @property
    def nbytes(self) -> int:
        return self._places() + self.values.nbytes(self.count)

    def write(self, e: Tensor, code: Tensor) -> None:
        chosen = self.share.largest_of(e)
        places = kernels.encode_chosen(chosen, *self._segments())
        code[: places.numel()] = places
        self.values.encode(e[chosen].float(), code[self._places() :], 0)

    def read(self, code: Tensor) -> tuple[Tensor, Tensor]:
        places = code[: kernels.chosen_bytes(*self._segments())]
        values = torch.empty(self.count, dtype=torch.float32, device=code.device)
        self.values.decode(code[self._places() :], values)
        return kernels.decode_chosen(places, *self._segments()), values

    def _segments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.share.starts, self.share.stops, self.share.k

    def _places(self) -> int:
        """Return the bytes of the indices, rounded up to a multiple of 4, so that floats can follow."""
        return -(-kernels.chosen_bytes(*self._segments()) // 4) * 4


def gathered(
    codes: Sequence[SparseMessage], errors: Sequence[Tensor], topology: Topology
) -> list[list[Tensor]]:
    """Gather the messages of all groups; return, for each vector, a list with one message per group.

    `errors` are the vectors from which this group's messages are made. Collective over the groups.
    """
    sizes = [code.nbytes for code in codes]
    mine = torch.zeros(sum(sizes), dtype=torch.uint8, device=errors[0].device)
    for code, e, part in zip(codes, errors, torch.split(mine, sizes), strict=True):
        if code.count:  # a rank may own nothing of a fragment
            code.write(e, part)
    rows = mine.new_empty((topology.num_groups, mine.numel()))
    if mine.numel():
        topology.inter_group.allgather(rows.view(-1), mine).wait()
    return [list(column) for column in torch.split(rows, sizes, dim=1)]


def norms(
    codes: Sequence[SparseMessage], said: Sequence[Sequence[Tensor]], topology: Topology
) -> list[float]:
    """Return ‖v_r‖ of the values that each group r has sent, with all its ranks. Collective in the group.

    `said` is the result of `gathered`.
    """
    squares = torch.zeros(topology.num_groups, dtype=torch.float64, device=said[0][0].device)
    for code, parts in zip(codes, said, strict=True):
        for group, part in enumerate(parts if code.count else ()):
            squares[group] += squared_norm(code.read(part.contiguous())[1].double())
    topology.intra_group.allreduce(squares).wait()
    return [square.item() ** 0.5 for square in squares]


@runtime_checkable
class MessageMean(Protocol):
    """A mean of sparse messages."""

    def divide(self, total: Tensor, sent: Sequence[Tensor]) -> None:
        """Divide `total`, the sum of all messages about a vector, in place.

        `sent` has the indices of the elements that each group in the sum has sent.
        """
        ...


@checked
@dataclass(frozen=True)
class OverGroups:
    """The mean over all groups, in which an element that a group does not send counts as 0.

    Use it as `mean` of `sparseloco`; it is the default.

    Example:
        >>> hpcsgd.sparseloco(sync_every=30, mean=hpcsgd.OverGroups()).schedule
        Every(I=30)

    References:
        A. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025 (arXiv:2508.15706),
        algorithm 1.

    See Also:
        `OverSenders`: the mean over those that send an element.
    """

    def divide(self, total: Tensor, sent: Sequence[Tensor]) -> None:
        """Divide `total` by the number of groups in it, of which `sent` has the indices."""
        total.div_(max(len(sent), 1))


@checked
@dataclass(frozen=True)
class OverSenders:
    """The mean of each element over the groups that send it.

    An element that only one of R groups sends moves R times as far as with `OverGroups`. So the outer
    learning rate has to be smaller: Covenant-72B lowered it from 1 to 0.65 and less. Use it as `mean` of
    `sparseloco`.

    Shape:
        While groups synchronize, it counts senders in one more vector of the size of a bucket's shard.

    Example:
        >>> method = hpcsgd.sparseloco(sync_every=2, density=0.1, lr=0.65, mean=hpcsgd.OverSenders())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)

    References:
        J. Lidin et al.: Covenant-72B: Pre-Training a 72B LLM with Trustless Peers Over-the-Internet, 2026
        (arXiv:2603.08163), and its published code.

    See Also:
        `OverGroups`: the mean of the paper of SparseLoCo.
    """

    def divide(self, total: Tensor, sent: Sequence[Tensor]) -> None:
        """Divide each element of `total` by the number of groups whose indices `sent` has it."""
        senders = torch.zeros_like(total)
        for places in sent:
            senders[places] += 1
        total.div_(senders.clamp_(min=1))


@checked
@dataclass(frozen=True)
class MedianNorm:
    """The limit of what a group sends to the median norm over the groups.

    So no group can move the model much farther than the others, such as one with broken data. What a group
    sends is left out if it is not finite. Use it as `clip` of `sparseloco`.

    Shape:
        With groups of several ranks, 8 bytes per group are added up in each group at a synchronization.

    Note:
        `optimizer.metrics["clip_factor"]` is the factor of this group at a synchronization: 1 if it is not
        limited, 0 if it is left out. What is cut off is lost: error feedback only keeps what was not sent.

    Example:
        >>> method = hpcsgd.sparseloco(sync_every=2, density=0.1, clip=hpcsgd.MedianNorm())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> 0 < optimizer.metrics["clip_factor"] <= 1
        True

    References:
        J. Lidin et al.: Covenant-72B: Pre-Training a 72B LLM with Trustless Peers Over-the-Internet, 2026
        (arXiv:2603.08163), and its published code.

    See Also:
        `PseudoGradientPenalty`: leaves out groups that are outliers of their own history.
    """

    def factors(self, norms: Sequence[float]) -> list[float]:
        """Return the factor of each group's message by the `norms` of all groups' messages."""
        given = torch.tensor(norms, dtype=torch.float64, device="cpu")
        moved = given[given.isfinite() & (given > 0)]
        middle = moved.median() if len(moved) else given.new_zeros(())
        return torch.where(given.isfinite(), (middle / given).nan_to_num(1.0).clamp(max=1.0), 0.0).tolist()


MESSAGE_MEANS: Mapping[str, Callable[..., MessageMean]] = {
    "over_groups": OverGroups,
    "over_senders": OverSenders,
}
"""The means of sparse messages, by their names in job files."""
CLIPS: Mapping[str, Callable[..., MedianNorm]] = {"median_norm": MedianNorm}
"""The limits of sparse messages, by their names in job files."""
