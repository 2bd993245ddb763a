"""Parameters that torch has sharded over the group (`fully_shard`): what this position has of each, as views
of flat vectors.

A bucket of these is all this position's: `own` is `w`, and nobody gathers it. torch does, block by block,
when a module is used. Its shards of a parameter are rows, cut along dimension 0 into K equal parts, of which
the last ones may be shorter, or empty. It pads these to the length of the first, and so does the bucket: that
is as long on every position, and zero where there is no row.

torch has two names for the memory of a shard, the parameter's tensor and the padded vector that it gathers
from: both are made views of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from hpcsgd.core.flat import Bucket
from hpcsgd.core.layout import Layout, Slot
from hpcsgd.core.rows import in_buckets
from hpcsgd.errors import UserError

BY_TORCH = 'fully_shard(module, mesh=job.mesh()["group"])'


Kept = Any
"""What torch knows of a sharded parameter, a class without a public name: its `sharded_param`, whether to
`pin_memory` and `_sharded_param_data`, from which it gathers."""


def is_sharded(x: Tensor) -> bool:
    """Whether it is a DTensor, for which nobody need import these."""
    return hasattr(x, "placements")


def local(x: Tensor) -> Tensor:
    """What there is of it on this rank."""
    return cast(Any, x).to_local().detach() if is_sharded(x) else x


def local_of(whole: Tensor, x: Tensor) -> Tensor:
    """Likewise of `whole`, which has the form of `x`."""
    if not is_sharded(x):
        return whole
    mesh = cast(Any, x).device_mesh
    rows: Sequence[Tensor] = whole.chunk(mesh.size())
    j: int = mesh.get_local_rank()
    return rows[j] if j < len(rows) else whole[:0]


def gathered(x: Tensor) -> Tensor:
    """All of it; collective over the ranks that share it."""
    return cast(Any, x).full_tensor() if is_sharded(x) else x


def local_like(x: Tensor, here: Tensor) -> Tensor:
    """A DTensor such as `x`, of which this rank has `here`."""
    from torch.distributed.tensor import DTensor

    theirs = cast(Any, x)
    return DTensor.from_local(
        here, theirs.device_mesh, theirs.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


class Shard(Slot):
    """What this position has of one parameter, from element `first` on, and behind it in the bucket as much
    padding as makes it as long as that of position 0."""

    def __init__(self, name: str, kept: Kept, start: int, number: int, j: int) -> None:
        self._kept = kept
        super().__init__(name, kept.sharded_param, start, number)
        self.padded = kept._sharded_param_data.numel()
        self.first = min(j * self.padded, self.param.numel())
        self._gradient: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        return local(self.param)

    @property
    def gradient(self) -> Tensor | None:
        return None if self.param.grad is None else local(self.param.grad)

    def at_home(self) -> bool:
        """Whether torch gathers from here, too."""
        return super().at_home() and self._kept._sharded_param_data.data_ptr() == self._padded_home

    def make_room(self, g: Tensor) -> None:
        super().make_room(g)
        assert self._view is not None
        self._gradient = local_like(self.param, self._view)

    def move_into(self, w: Tensor) -> None:
        super().move_into(w)
        self._padded_home = self._part.data_ptr()
        self._kept._sharded_param_data = self._part

    def pend(self) -> None:
        """Nothing: torch averages this gradient within the group by itself, and has it whole nowhere."""

    def _become(self, view: Tensor) -> None:
        cast(Any, self.param)._local_tensor = view

    def _become_gradient(self, view: Tensor) -> None:
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
    kept = {each.sharded_param: each for each in _kept_of(model)}
    found: list[Bucket] = []
    for rows in in_buckets(named, K, bucket_bytes, lambda param: kept[param].pin_memory):
        shards: list[Shard] = []
        size = 0
        for x in rows:
            shards.append(Shard(x.name, kept[x.param], size, x.number, j))
            size += shards[-1].padded
        layout = Layout(shards, size, whole=False, pinned=kept[rows[0].param].pin_memory)
        found.append(Bucket(layout, 1, 0))
    return found


def require_sharded_alike(named: Sequence[tuple[str, nn.Parameter]], ranks: Sequence[int]) -> None:
    """Raise `UserError` unless torch has sharded all of these, by rows, over the group of `ranks`."""
    for name, param in named:
        if not is_sharded(param):
            other = next(n for n, p in named if is_sharded(p))
            raise UserError(
                f"{name} is whole, and {other} is sharded by torch: call fully_shard(model, ...) for what is "
                "outside the blocks, too, and make the optimizer before the first forward pass"
            )
        theirs = cast(Any, param)
        over = theirs.device_mesh.mesh.flatten().tolist()
        if over != list(ranks) or theirs.device_mesh.ndim != 1 or not _by_rows(theirs.placements):
            raise UserError(
                f"parameter {name} is sharded by torch as {tuple(theirs.placements)} over ranks {over}; "
                f"this group is ranks {list(ranks)}: {BY_TORCH}"
            )


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if hasattr(type(m), "set_requires_gradient_sync"))


def _kept_of(model: nn.Module) -> Iterator[Kept]:
    for module in _sharded_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            yield from [] if group is None else group.fsdp_params


def _by_rows(placements: Sequence[Any]) -> bool:
    from torch.distributed.tensor import Shard as Cut

    return tuple(placements) == (Cut(0),)
