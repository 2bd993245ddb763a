"""The tensors that the user's optimizer updates in place of parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hpcsgd.core.elements import as_elements, as_reals, require_alike, shaped
from hpcsgd.core.flat import Bucket
from hpcsgd.core.fsdp import is_fsdp, local
from hpcsgd.engine.initial_state import in_memory_order
from hpcsgd.engine.master import Master, needs_master


@dataclass(slots=True)
class OptimizerParam:
    """A tensor that the optimizer updates: elements [start, stop), in memory order, of one parameter."""

    index: int
    """The parameter's number in the optimizer's state_dict."""
    param: nn.Parameter
    tensor: Tensor
    start: int
    stop: int
    bucket: Bucket | None = None
    """The bucket of the parameter. None if every rank updates whole parameters."""
    offset: int = 0
    """Index of the tensor's first element in the bucket's `param_shard`."""
    whole: bool = True
    """True if the tensor has the shape of its parameter."""
    master: Master | None = None
    """Set if the tensor holds master weights, from which the model's elements are rounded."""
    is_complex: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_complex = self.param.is_complex()

    def take_gradient(self, *, absent: bool = False) -> None:
        """Set the tensor's gradient from the bucket, or to None if it is `absent` on all ranks."""
        g = self.param.grad
        if absent:
            g = None
        elif is_fsdp(self.param):
            g = None if g is None else local(g).view(-1)
        elif self.bucket is not None:
            g = self._place_in(self.bucket, self.bucket.grad_shard)
        elif self.is_complex and g is not None:
            g = g.resolve_conj()  # torch's optimizers read the two reals of a number in memory
        if self.master is not None:
            self.master.take_gradient(g)
        else:
            self.tensor.grad = g

    def as_reals(self) -> Tensor:
        """Return the tensor with its gradient; if it is complex, views of the real numbers of both."""
        if not self.is_complex:
            return self.tensor
        reals, g = as_reals(self.tensor.detach()), self.tensor.grad
        reals.grad = None if g is None else as_reals(g)
        return reals

    def drop_gradient(self) -> None:
        """Drop a used gradient of FSDP, so that `zero_grad()` frees its memory."""
        if is_fsdp(self.param):
            self.tensor.grad = None

    def restore_tensor(self) -> None:
        """Move the tensor back into the bucket with its values, if the optimizer gave it other memory."""
        if self.bucket is None or self.master is not None:
            return
        place = self._place_in(self.bucket, self.bucket.param_shard)
        if place.data_ptr() != self.tensor.data_ptr():
            require_alike(f"{self.index} (a part of it)", self.tensor, place)
            place.copy_(self.tensor.detach())
            self.tensor.data = place

    def keep_master(self, dtype: torch.dtype) -> None:
        """Replace the tensor with master weights of `dtype`, if the parameter has fewer bits."""
        if needs_master(self.param, dtype):
            self.master = Master.of(self.tensor, dtype)
            self.tensor = self.master.m

    def _place_in(self, bucket: Bucket, own: Tensor) -> Tensor:
        return place_in(own, bucket, self.offset, self.stop - self.start, self.param)

    def cut(self, value: Tensor) -> Tensor:
        """Return this tensor's part of a state tensor shaped like the parameter."""
        if self.whole:
            return value.clone()
        return in_memory_order(value, self.param)[self.start : self.stop].clone()


def place_in(own: Tensor, bucket: Bucket, offset: int, numel: int, param: nn.Parameter) -> Tensor:
    """Return a view of the `numel` elements of `param` that begin at `offset` in this rank's shard `own`.

    If the bucket does not cut parameters, the view has the shape of `param`, otherwise one dimension.
    """
    elements = as_elements(own[offset : offset + numel * bucket.reals], bucket.reals)
    return shaped(elements, 0, param) if bucket.whole else elements
