"""Parameters of FSDP models: this rank's part of each as a view of flat vectors.

A bucket of such parameters holds only this rank's parts: `param_shard` is `w`. hpcsgd does not gather them;
torch does, unit by unit, when a module is used. torch cuts a parameter along dimension 0 into K equal parts,
of which the last ones may be shorter or empty. torch pads shorter parts to the length of the first, and so
does the bucket. So the bucket is equally long on every rank, and zero where there is no row.

torch has two tensors in the memory of a part: the parameter's tensor, and the padded vector from which it
gathers. Both are made views of the bucket.
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

if TYPE_CHECKING:  # slow to import, and needed only for FSDP models
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Placement

BY_TORCH = 'fully_shard(module, mesh=topology.mesh()["shard"])'


FsdpParam = Any
"""torch's record of an FSDP parameter; its class has no public name (`torch_private.sharded_params`)."""


def is_fsdp(x: Tensor) -> TypeGuard[DTensor]:
    """Return whether `x` is a DTensor, without importing the class."""
    return hasattr(x, "placements")


def local(x: Tensor) -> Tensor:
    """Return this rank's part of `x`; if `x` is not a DTensor, `x` itself."""
    return x.to_local().detach() if is_fsdp(x) else x


def local_of(whole: Tensor, x: Tensor) -> Tensor:
    """Return this rank's part of the tensor `whole`, cut into rows as the DTensor `x` is.

    If `x` is not a DTensor, return `whole`.
    """
    if is_fsdp(x):
        rows = whole.chunk(x.device_mesh.size())
        j = x.device_mesh.get_local_rank()
        return rows[j] if j < len(rows) else whole[:0]
    return whole


def all_gathered(x: Tensor) -> Tensor:
    """Return all elements of `x`, a DTensor or not; collective over the ranks that share it."""
    return x.full_tensor() if is_fsdp(x) else x


def local_like(x: Tensor, here: Tensor) -> Tensor:
    """Return a DTensor like the DTensor `x` whose part on this rank is `here`."""
    from torch.distributed.tensor import DTensor

    assert is_fsdp(x)
    return DTensor.from_local(
        here, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


class FsdpSlot(Slot):
    """This rank's part of one FSDP parameter, from element `first` on.

    In the bucket the part is followed by padding, up to the length of the part of rank 0 of the group.
    """

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

    def at_home(self) -> bool:
        gathered_from = torch_private.padded_shard(self._kept).data_ptr()
        return self.tensor.data_ptr() == self._home and gathered_from == self._padded_home

    def is_attached(self) -> bool:
        grad, view = self.gradient, self._view
        return grad is not None and view is not None and grad.data_ptr() == view.data_ptr()

    def pend(self) -> None:
        """Do nothing: torch averages this gradient within the group, and no rank holds all of it."""

    def _become(self, view: Tensor) -> None:
        torch_private.set_local(self.param, view)
        self._padded_home = self._part.data_ptr()
        torch_private.set_padded_shard(self._kept, self._part)

    def _make_gradient(self) -> None:
        self._gradient = local_like(self.param, self._view)

    def show(self) -> None:
        self.param.grad = self._gradient


def reshard(model: nn.Module) -> None:
    """Discard weights that a forward pass has left gathered, because the shards are about to change."""
    for module in _sharded_modules(model):
        module.reshard()


def flatten_shards(
    named: Iterable[tuple[str, nn.Parameter]], model: nn.Module, K: int, j: int, bucket_bytes: float
) -> list[Bucket]:
    """Make rank `j`'s part of each trainable FSDP parameter a view of new buckets, for a group of K.

    Return the buckets. A bucket ends once it has `bucket_bytes` bytes on all ranks of the group together.
    """
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
    """Raise `UserError` unless torch has sharded all parameters `named`, by rows, over the group `ranks`."""
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
