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
"""How many references Python counts to the view of a gradient that nobody else has."""


class Slot(ABC):
    """What this rank has of one parameter, as a view of its bucket's elements [start, stop)."""

    first = 0
    """Which of the parameter's elements, in memory order, is at `start`."""
    may_pend: bool
    """Whether its gradient is averaged by whoever uses it first."""

    def __init__(self, name: str, param: nn.Parameter, start: int, number: int) -> None:
        self.name = name
        self.param = param
        self.reals = reals_per_element(param)
        """How many elements of the bucket one of the parameter is: a complex number is a pair of reals."""
        self.start = start
        self.stop = start + self.tensor.numel() * self.reals
        self.number = number
        """Its place among all parameters, in the order of the forward pass."""
        self._view: Any = None
        """The parameter's place in g, in its shape and strides; None until there is room for gradients."""
        self.padded = self.stop - start  # so many elements of w are for it
        self._part: Tensor  # these elements
        self._place: Tensor  # among them the parameter, in its shape and strides
        self._home: int | None = None
        self._use: Callable[[], Callable[[], None] | None] = lambda: None

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """What there is of the parameter on this rank."""

    @property
    @abstractmethod
    def gradient(self) -> Tensor | None:
        """Likewise of its gradient, wherever that is."""

    @abstractmethod
    def pend(self) -> None:
        """What the view holds is not the averaged gradient, or not all of it."""

    @abstractmethod
    def _become(self, view: Tensor) -> None:
        """Make `view` the memory of the parameter."""

    @abstractmethod
    def _is_gathered_from_here(self) -> bool:
        """Whether whoever gathers the parameter for a forward pass does so from this memory."""

    @abstractmethod
    def _make_gradient(self) -> None:
        """Make of the view what `param.grad` is to be."""

    @abstractmethod
    def _show_gradient(self) -> None:
        """Make `param.grad` the view."""

    @abstractmethod
    def _is_view(self, grad: Tensor | None) -> bool:
        """Whether `grad` is the view."""

    def move_into(self, w: Tensor) -> None:
        """Make the parameter a view of `w`, keeping its values."""
        part = w[self.start : self.start + self.padded]
        # With a storage of its own, in the same memory if it has any: who saves it saves nothing else.
        self._part = part if part.is_meta else from_dlpack(to_dlpack(part))
        self._place = shaped(as_elements(self._part, self.reals), 0, self.tensor)
        self._place.copy_(self.tensor.detach())
        self._become(self._place)
        self._home = self.tensor.data_ptr()

    def at_home(self) -> bool:
        """Whether nobody has moved the parameter elsewhere since."""
        return self.tensor.data_ptr() == self._home and self._is_gathered_from_here()

    def come_home(self) -> None:
        """Make a parameter that was given other memory its view of `w` again, with the values that it has."""
        if not self.at_home():
            require_alike(self.name, self.tensor, self._place)
            self._place.copy_(self.tensor.detach())
            self._become(self._place)

    def make_room(self, g: Tensor) -> None:
        """Gradients are to be views of `g`."""
        self._view = shaped(as_elements(g[self.start : self.stop], self.reals), 0, self.tensor)
        self._room = self._view.detach(), self._view.data_ptr()
        self._make_gradient()

    def is_attached(self) -> bool:
        """Whether `param.grad` is the view: nobody has put another tensor, or None, in its place."""
        return self._is_view(self.gradient)

    def has_graph(self) -> bool:
        """Whether autograd has put a gradient there that can be differentiated itself."""
        grad = self.gradient
        return grad is not None and not self._is_view(grad) and grad.requires_grad

    def on_use(self, use: Callable[[], Callable[[], None] | None]) -> None:
        """While the gradient is pending, its first use calls what `use`, a weak reference, refers to."""
        self._use = use

    def settle(self) -> None:
        """The view holds the gradient, and is a plain tensor, which can be copied and saved."""
        torch_private.become(self._view, Tensor)
        self._view.__dict__.pop("use", None)

    @property
    def pending(self) -> bool:
        """Whether it is so that the first use of the gradient has to average it."""
        return self._view.__class__ is PendingGradient

    def attach(self) -> None:
        """Make `param.grad` the view, keeping the gradient that autograd or the user put there, if any."""
        grad = self.gradient
        if self._is_view(grad):
            if not self.pending:  # or nobody has had it
                self._bring_back()
            return
        if sys.getrefcount(self._view) > OWN:
            self._leave_to_others()
        self.settle()
        self._bring_back()
        if grad is None:
            self._view.zero_()
            return
        if grad.layout != torch.strided:
            raise UserError(
                f"gradient of {self.name} is sparse; only dense ones are exchanged (sparse=False)"
            )
        self._view.copy_(grad.detach())
        self.show()

    def _leave_to_others(self) -> None:
        """Whoever has kept the gradient of an earlier step keeps its values, as in plain PyTorch."""
        kept, pending = self._view, self.pending
        self.settle()
        self._bring_back()
        self._view = self._room[0].detach()
        kept.data = kept.detach().clone()
        if pending:  # and never averaged for them
            torch_private.become(kept, PendingGradient)
            kept.use = lambda: functools.partial(refuse_kept, self.name)

    def _bring_back(self) -> None:
        """Where the view itself was given other memory, as by `param.grad.data = x`, take its values over."""
        room, place = self._room
        if self._view.data_ptr() != place:
            given = self._view.detach()
            if (given.shape, given.dtype) != (room.shape, room.dtype):
                raise UserError(f"gradient of {self.name} was made one of {given.dtype}, {list(given.shape)}")
            room.copy_(given)
            self._view.data = room

    def any(self) -> bool:
        """Whether the view holds anything but zeros."""
        with torch_private.plainly():
            return bool(self._view.any())

    def blank(self) -> None:
        """Have zeros in the view."""
        with torch_private.plainly():
            self._view.zero_()

    def show(self) -> None:
        """Make `param.grad` the view, whatever was there."""
        self._show_gradient()

    def hide(self) -> None:
        """Make `param.grad` None: nobody has a gradient."""
        self.param.grad = None


class Whole(Slot):
    """All of a parameter."""

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

    def _is_gathered_from_here(self) -> bool:
        return True  # nobody gathers it

    def _make_gradient(self) -> None:
        """The view is it."""

    def _show_gradient(self) -> None:
        self.param.grad = self._view

    def _is_view(self, grad: Tensor | None) -> bool:
        return grad is self._view


def refuse_kept(name: str) -> NoReturn:
    """Raise `UserError` for a gradient that was kept, and is used when it cannot be averaged any more."""
    raise UserError(
        f"a gradient of {name} was kept, and used for the first time after that of a later step had come: "
        "use it between its backward() and the next one, or call optimizer.synchronize() there"
    )
