"""What the user's optimizer has in place of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcsgd.core.flat import Bucket
from hpcsgd.core.layout import require_alike, shaped
from hpcsgd.core.shards import is_sharded, local
from hpcsgd.engine.master import Master, needs_master
from hpcsgd.engine.memory_order import in_memory_order


@dataclass(slots=True)
class Held:
    """A tensor the optimizer updates: elements [start, stop), in memory order, of one parameter."""

    index: int
    """The parameter's number in the optimizer's state_dict."""
    param: nn.Parameter
    tensor: Tensor
    start: int
    stop: int
    bucket: Bucket | None = None
    """None where whole parameters are updated on every position."""
    offset: int = 0
    """Where it begins in the bucket's own chunk."""
    whole: bool = True
    """Whether it has the shape of its parameter."""
    master: Master | None = None
    """Where the tensor is one, and the model's elements are rounded from it."""

    def take_gradient(self, *, absent: bool = False) -> None:
        """Find the gradient that the exchange left in the bucket; none where it is `absent` on all ranks."""
        g = self.param.grad
        if absent:
            g = None
        elif is_sharded(self.param):
            g = None if g is None else local(g).view(-1)
        elif self.bucket is not None:
            g = self.bucket.g_own[self.offset : self.offset + self.tensor.numel()]
            g = shaped(g, 0, self.param) if self.whole else g
        if self.master is not None:
            self.master.take_gradient(g)
        else:
            self.tensor.grad = g

    def leave_gradient(self) -> None:
        """Once it has been used: where it is torch's, whoever drops it is to have its memory back."""
        if is_sharded(self.param):
            self.tensor.grad = None

    def come_home(self) -> None:
        """Make a piece that was given other memory its view of the bucket again, with its own values."""
        if self.bucket is None or self.master is not None:
            return
        place = place_in(self.bucket, self.offset, self.stop - self.start, self.param)
        if place.data_ptr() != self.tensor.data_ptr():
            require_alike(f"{self.index} (a piece of it)", self.tensor, place)
            place.copy_(self.tensor.detach())
            self.tensor.data = place

    def keep_master(self, dtype: torch.dtype) -> None:
        """Have a master of that type updated in place of the model's elements, if they are narrower."""
        if needs_master(self.param, dtype):
            self.master = Master.of(self.tensor, dtype)
            self.tensor = self.master.m

    def cut(self, value: Tensor) -> Tensor:
        """This tensor's part of a state tensor shaped like the parameter."""
        if self.whole:
            return value.clone()
        return in_memory_order(value, self.param)[self.start : self.stop].clone()


def place_in(bucket: Bucket, offset: int, numel: int, param: nn.Parameter) -> Tensor:
    """The elements of a piece of `param` in the bucket's own chunk, in its shape if it is a whole one."""
    w = bucket.own[offset : offset + numel]
    return shaped(w, 0, param) if bucket.whole else w
