"""One parameter's place in the flat vectors of weights and of gradients."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from hpcsgd import torch_private
from hpcsgd.core.elements import as_elements, reals_per_element, require_alike, shaped
from hpcsgd.core.pending_gradient import PendingGradient
from hpcsgd.errors import UserError

OWN = 2
"""The result of `sys.getrefcount` for a gradient's view to which nothing but its slot refers."""


class Slot(ABC):
    """This rank's part of one parameter: a view of the elements [start, stop) of its bucket.

    The gradient's *view* is the same part of the bucket's gradients `g`. Once it is attached, `param.grad` is
    this view.
    """

    first = 0
    """Index, in memory order, of the parameter's element at `start`."""
    may_pend: bool
    """True if the parameter's gradient may stay unaveraged until it is first used."""

    def __init__(self, name: str, param: nn.Parameter, start: int, number: int) -> None:
        self.name = name
        self.param = param
        self.reals = reals_per_element(param)
        """Elements of the bucket per element of the parameter: 2 for complex numbers, otherwise 1."""
        self.start = start
        self.stop = start + self.tensor.numel() * self.reals
        self.number = number
        """Index among all parameters, in the order of the forward pass."""
        self._view: Any = None
        """The parameter's part of g, in the parameter's shape and strides; None until g is allocated."""
        self.padded = self.stop - start  # number of elements of w that are reserved for the parameter
        self._part: Tensor  # the reserved elements of w
        self._place: Tensor  # the parameter within `_part`, in its shape and strides
        self._home: int | None = None
        self._use: Callable[[], Callable[[], None] | None] = lambda: None

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """The part of the parameter on this rank."""

    @property
    @abstractmethod
    def gradient(self) -> Tensor | None:
        """This rank's part of `param.grad`, which may be another tensor than the view in `g`; or None."""

    @abstractmethod
    def pend(self) -> None:
        """Mark the gradient's view in `g` as pending: not all of it has been averaged yet."""

    @abstractmethod
    def _become(self, view: Tensor) -> None:
        """Make `view`, a part of `w`, the memory of the parameter."""

    @abstractmethod
    def at_home(self) -> bool:
        """Return whether the parameter still lies in its bucket, and forward passes use it from there."""

    @abstractmethod
    def is_attached(self) -> bool:
        """Return whether `param.grad` is the gradient's view in `g`, not another tensor or None."""

    @abstractmethod
    def show(self) -> None:
        """Set `param.grad` to the gradient's view in `g`, even if it was another tensor."""

    @abstractmethod
    def _make_gradient(self) -> None:
        """Make the tensor that will be `param.grad` from the gradient's view in `g`."""

    def move_into(self, w: Tensor) -> None:
        """Make the parameter a view of `w`, keeping its values."""
        part = w[self.start : self.start + self.padded]
        # Each parameter gets a storage of its own in the same memory: saving it then saves nothing else.
        self._part = part if part.is_meta else from_dlpack(to_dlpack(part))
        self._place = shaped(as_elements(self._part, self.reals), 0, self.tensor)
        self._place.copy_(self.tensor.detach())
        self._become(self._place)
        self._home = self.tensor.data_ptr()

    def come_home(self) -> None:
        """Move a parameter that was given other memory back into `w`, with its current values."""
        if not self.at_home():
            require_alike(self.name, self.tensor, self._place)
            self._place.copy_(self.tensor.detach())
            self._become(self._place)

    def count_write(self) -> None:
        """Tell autograd that the parameter's values in `w` have changed, which it sees only through `param`.

        A backward pass through a graph of the earlier values then raises torch's exception.
        """
        torch.autograd.graph.increment_version(self.param)  # torch 2.4 takes one tensor, not a list

    def make_room(self, g: Tensor) -> None:
        """Make the gradient's view, the parameter's part of `g`, in the shape of the parameter."""
        self._view = shaped(as_elements(g[self.start : self.stop], self.reals), 0, self.tensor)
        self._room = self._view.detach(), self._view.data_ptr()
        self._make_gradient()

    def on_use(self, use: Callable[[], Callable[[], None] | None]) -> None:
        """Set `use`, a weak reference to the function that the first use of a pending gradient calls."""
        self._use = use

    def settle(self) -> None:
        """Make the gradient's view, no longer pending, a plain tensor that can be copied and saved."""
        torch_private.become(self._view, Tensor)
        self._view.__dict__.pop("use", None)

    @property
    def pending(self) -> bool:
        """True if the first use of the gradient has to average it."""
        return self._view.__class__ is PendingGradient

    def attach(self) -> bool:
        """Copy the gradient that autograd or the user set into `g`, and set `param.grad` to its view there.

        If there is no gradient, its part of `g` is filled with zeros and `param.grad` stays None. Return
        whether the gradient that was copied can itself be differentiated.
        """
        if self.is_attached():
            if not self.pending:  # a pending gradient has not been used, so nothing can have moved it
                self._bring_back()
            return False
        if sys.getrefcount(self._view) > OWN:
            self._leave_to_others()
        if self.pending:
            self.settle()
        self._bring_back()
        grad = self.gradient
        if grad is None:
            self._view.zero_()
            return False
        if grad.layout != torch.strided:
            raise UserError(
                f"gradient of {self.name} is sparse, but only dense ones can be averaged: use sparse=False"
            )
        has_graph = grad.requires_grad
        self._view.copy_(grad.detach() if has_graph else grad)
        self.show()
        return has_graph

    def _leave_to_others(self) -> None:
        """Give the earlier gradient, which the script still holds, memory of its own, as in plain PyTorch."""
        kept, pending = self._view, self.pending
        self.settle()
        self._bring_back()
        self._view = self._room[0].detach()
        kept.data = kept.detach().clone()
        if pending:  # it was never averaged, so using it is an error
            torch_private.become(kept, PendingGradient)
            kept.use = lambda: functools.partial(refuse_kept, self.name)

    def _bring_back(self) -> None:
        """Copy the gradient back into `g` if the script gave it other memory, as by `param.grad.data = x`."""
        room, place = self._room
        if self._view.data_ptr() != place:
            given = self._view.detach()
            if (given.shape, given.dtype) != (room.shape, room.dtype):
                raise UserError(f"gradient of {self.name} was made one of {given.dtype}, {list(given.shape)}")
            room.copy_(given)
            self._view.data = room

    def any(self) -> bool:
        """Return whether the parameter's part of `g` holds anything but zeros."""
        with torch_private.plainly():
            return bool(self._view.any())

    def blank(self) -> None:
        """Fill the parameter's part of `g` with zeros."""
        with torch_private.plainly():
            self._view.zero_()

    def hide(self) -> None:
        """Set `param.grad` to None, because no rank has a gradient of this parameter."""
        self.param.grad = None


class Whole(Slot):
    """The slot of a parameter that this rank holds whole."""

    may_pend = True

    @property
    def tensor(self) -> Tensor:
        return self.param

    @property
    def gradient(self) -> Tensor | None:
        return self.param.grad

    def pend(self) -> None:
        torch_private.become(self._view, PendingGradient)
        self._view.use = self._use

    def _become(self, view: Tensor) -> None:
        self.param.data = view

    def at_home(self) -> bool:
        return self.param.data_ptr() == self._home

    def is_attached(self) -> bool:
        return self.param.grad is self._view

    def show(self) -> None:
        self.param.grad = self._view

    def _make_gradient(self) -> None:
        """Do nothing: the gradient's view in `g` can itself be `param.grad`."""


def refuse_kept(name: str) -> NoReturn:
    """Raise `UserError` for a kept gradient that is used when it can no longer be averaged."""
    raise UserError(
        f"a gradient of {name} was kept, and used for the first time after that of a later step had come: "
        "use it between its backward() and the next one, or call optimizer.synchronize() there"
    )
