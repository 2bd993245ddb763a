"""Parameters that torch has sharded over the group (`fully_shard`): what this position has of each, as views
of flat vectors.

A bucket of these is all this position's: `param_shard` is `w`, and nobody gathers it. torch does, block by
block, when a module is used. Its shards of a parameter are rows, cut along dimension 0 into K equal parts, of
which the last ones may be shorter, or empty. It pads these to the length of the first, and so does the
bucket: that is as long on every position, and zero where there is no row.

torch has two names for the memory of a shard, the parameter's tensor and the padded vector that it gathers
from: both are made views of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import Tensor, nn

from hpcsgd import torch_private
from hpcsgd.core.flat import Bucket
from hpcsgd.core.layout import Layout
from hpcsgd.core.rows import in_buckets
from hpcsgd.core.slot import Slot
from hpcsgd.errors import UserError

if TYPE_CHECKING:  # slow to import, and not needed by whoever shards nothing
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Placement

BY_TORCH = 'fully_shard(module, mesh=topology.mesh()["group"])'


FsdpParam = Any
"""What torch knows of a sharded parameter, a class without a public name (`torch_private.sharded_params`)."""


def is_fsdp(x: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, for which nobody need import these."""
    return hasattr(x, "placements")


def local(x: Tensor) -> Tensor:
    """What there is of it on this rank."""
    return x.to_local().detach() if is_fsdp(x) else x


def local_of(whole: Tensor, x: Tensor) -> Tensor:
    """Likewise of `whole`, which has the form of `x`."""
    if is_fsdp(x):
        rows = whole.chunk(x.device_mesh.size())
        j = x.device_mesh.get_local_rank()
        return rows[j] if j < len(rows) else whole[:0]
    return whole


def all_gathered(x: Tensor) -> Tensor:
    """All of it; collective over the ranks that share it."""
    return x.full_tensor() if is_fsdp(x) else x


def local_like(x: Tensor, here: Tensor) -> Tensor:
    """A DTensor such as `x`, which is one, of which this rank has `here`."""
    from torch.distributed.tensor import DTensor

    assert is_fsdp(x)
    return DTensor.from_local(
        here, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


class FsdpSlot(Slot):
    """What this position has of one parameter, from element `first` on, and behind it in the bucket as much
    padding as makes it as long as that of position 0."""

    may_pend = False

    def __init__(self, name: str, kept: FsdpParam, start: int, number: int, j: int) -> None:
        self._kept = kept
        super().__init__(name, kept.sharded_param, start, number)
        self.padded = torch_private.padded_shard(kept).numel()
        self.first = min(j * self.padded, self.param.numel())
        self._gradient: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        return local(self.param)

    @property
    def gradient(self) -> Tensor | None:
        return None if self.param.grad is None else local(self.param.grad)

    def _is_gathered_from_here(self) -> bool:
        return torch_private.padded_shard(self._kept).data_ptr() == self._padded_home

    def pend(self) -> None:
        """Nothing: torch averages this gradient within the group by itself, and has it whole nowhere."""

    def _become(self, view: Tensor) -> None:
        torch_private.set_local(self.param, view)
        self._padded_home = self._part.data_ptr()
        torch_private.set_padded_shard(self._kept, self._part)

    def _make_gradient(self) -> None:
        self._gradient = local_like(self.param, self._view)

    def _show_gradient(self) -> None:
        self.param.grad = self._gradient

    def _is_view(self, grad: Tensor | None) -> bool:
        return grad is not None and self._view is not None and grad.data_ptr() == self._view.data_ptr()


def reshard(model: nn.Module) -> None:
    """Weights that a forward pass has left gathered are forgotten: shards move without them."""
    for module in _sharded_modules(model):
        module.reshard()


def flatten_shards(
    named: Iterable[tuple[str, nn.Parameter]], model: nn.Module, K: int, j: int, bucket_bytes: float
) -> list[Bucket]:
    """Lay out for position `j` of K what torch has given it of each trainable parameter, and make that a view
    of buckets; these are of as many bytes as those of whole parameters, over all positions."""
    kept = {each.sharded_param: each for each in _fsdp_params_of(model)}
    found: list[Bucket] = []
    for rows in in_buckets(named, K, bucket_bytes, lambda param: kept[param].pin_memory):
        shards: list[FsdpSlot] = []
        size = 0
        for x in rows:
            shards.append(FsdpSlot(x.name, kept[x.param], size, x.number, j))
            size += shards[-1].padded
        layout = Layout(shards, size, whole=False, pinned=kept[rows[0].param].pin_memory)
        found.append(Bucket(layout, 1, 0))
    return found


def require_sharded_alike(named: Sequence[tuple[str, nn.Parameter]], ranks: Sequence[int]) -> None:
    """Raise `UserError` unless torch has sharded all of these, by rows, over the group of `ranks`."""
    for name, param in named:
        theirs = param if is_fsdp(param) else None
        if theirs is None:
            other = next(n for n, p in named if is_fsdp(p))
            raise UserError(
                f"{name} is whole, and {other} is sharded by torch: call fully_shard(model, ...) for what is "
                "outside the blocks, too, and make the optimizer before the first forward pass"
            )
        mesh, placements = theirs.device_mesh, theirs.placements
        over = [int(rank) for rank in mesh.mesh.flatten()]
        if over != list(ranks) or mesh.ndim != 1 or not _by_rows(placements):
            raise UserError(
                f"parameter {name} is sharded by torch as {tuple(placements)} over ranks {over}; "
                f"this group is ranks {list(ranks)}: {BY_TORCH}"
            )


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    found = (m for m in model.modules() if hasattr(type(m), "set_requires_gradient_sync"))
    return cast("Iterator[FSDPModule]", found)


def _fsdp_params_of(model: nn.Module) -> Iterator[FsdpParam]:
    for module in _sharded_modules(model):
        yield from torch_private.sharded_params(module)


def _by_rows(placements: Sequence[Placement]) -> bool:
    from torch.distributed.tensor import Shard as Cut

    return tuple(placements) == (Cut(0),)
