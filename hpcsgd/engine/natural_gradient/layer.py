"""The natural gradient of one weight: hooks observe minibatches, and change gradients before `.grad`.

A tensor hook replaces the gradient. torch calls the hook before it adds the gradient to `.grad`: once per
backward pass, for all uses of the weight together. So whatever uses gradients later (reduction, clipping,
optimizer) sees the preconditioned gradient.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpcsgd.comm.on_host import Arrivals
from hpcsgd.comm.streams import take_over
from hpcsgd.engine.natural_gradient.fisher import Fisher, Shrinkage, Update, largest, linalg, natural
from hpcsgd.engine.natural_gradient.rows import input_rows, output_rows

log = logging.getLogger(__name__)

FASTEST = 0.9
"""The largest weight η of a new minibatch, so that a Fisher estimate never forgets everything at once."""

ROWS = 512
"""Most rows that an update of an estimate uses; a convolution has a row for each position of a sample."""


class Side:
    """The Fisher estimate for the inputs of one layer, or for the derivatives of its outputs.

    An update begins once its rows are available. It is finished when the estimate is needed, usually one step
    later, so that the host does not wait for a device.
    """

    def __init__(self, name: str, rank: int, alpha: float, history: float) -> None:
        self._name = name
        self._rank, self._alpha, self._history = rank, alpha, history
        self._complained = False
        self._update: Update | None = None
        self._set(None)

    @property
    def F(self) -> Fisher | None:
        """The Fisher estimate from all rows so far."""
        self._finish()
        return self._F

    @property
    def shrinkage(self) -> Shrinkage | None:
        """The matrix with which gradients are multiplied: `Fisher.shrinkage` of F."""
        self._finish()
        return self._shrinkage

    @property
    def is_known(self) -> bool:
        """True if there is an estimate, not counting an update that is not finished."""
        return self._F is not None

    def look_at(self, X: Tensor, pending: Arrivals) -> None:
        """Begin to add the rows X [N, D] to the estimate; if that fails, this side has no estimate."""
        if (F := self.F) is None:
            return self._set(self._first(X))
        eta = min(1 - math.exp(-len(X) / self._history), FASTEST)
        self._update = F.begun(X.to(F.R), eta, pending)

    def _first(self, X: Tensor) -> Fisher | None:
        """Return the first Fisher estimate; the host waits for the device in each step of its computation."""
        if not math.isfinite(largest(X).item()):
            return self._complain("are not finite: left out")
        return self._attempt(lambda: Fisher.of(X, self._rank))

    def _finish(self) -> None:
        if (update := self._update) is not None:
            self._update = None
            take_over(update.Y)  # a backward pass may be on another stream
            if update.is_of_numbers():
                self._set(self._attempt(update.finished))
            else:
                self._complain("are not finite: left out")

    def _attempt(self, estimate: Callable[[], Fisher | None]) -> Fisher | None:
        try:
            F = estimate()
        except linalg.LinAlgError as error:
            return self._complain(f"have no estimate: starting afresh ({error})")
        if F is not None and not F.is_finite():
            return self._complain("have no finite estimate: starting afresh")
        return F

    def state_dict(self) -> dict[str, Any]:
        F = self.F
        return {} if F is None else {"R": F.R, "eigenvalues": F.eigenvalues, "rho": F.rho}

    def load_state_dict(self, state: Mapping[str, Any], like: Tensor, D: int) -> bool:
        """Load `state`; return whether it fits this side's rank and size."""
        if not state:
            self._set(None)
            return True
        r = min(self._rank, D - 1)
        if tuple(state["R"].shape) != (r, D):
            return False
        dtype = torch.promote_types(like.dtype, torch.float32)
        R = state["R"].to(like.device, dtype, copy=True)
        self._set(Fisher(R, state["eigenvalues"].to("cpu", torch.float64, copy=True), float(state["rho"])))
        return True

    def _set(self, F: Fisher | None) -> None:
        self._update = None
        self._F = F
        self._shrinkage = None if F is None else F.shrinkage(self._alpha)

    def _complain(self, what: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("natural gradient: %s %s", self._name, what)


class Watch:
    """A forward hook that passes inputs and outputs of one module to `saw`.

    In copies of the model, and in saved models, it does nothing.
    """

    def __init__(self, saw: Callable[[nn.Module, tuple[Any, ...], Any], None]) -> None:
        # A compiled graph would drop hooks on outputs, so it must break here.
        self._saw: Any = torch.compiler.disable(saw)  # pyright: ignore[reportUnknownMemberType]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._saw(module, args, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, (_nothing,)


def _nothing(*_: object) -> None:
    """Do nothing: the hook of a copied model."""


class Layer:
    """A weight [D_out, …], used as a matrix [D_out, D_in], and the modules that use it."""

    def __init__(self, name: str, weight: nn.Parameter, rank: int, alpha: float, history: float) -> None:
        self.name = name
        self.weight = weight
        self.inputs = Side(f"inputs of {name}", rank, alpha, history)
        self.outputs = Side(f"derivatives of {name}", rank, alpha, history)
        self.due = True
        """True if the next minibatch is to be observed."""
        self._modules: list[nn.Module] = []
        self._biases: list[nn.Parameter] = []
        self._shift = 0.0
        self._taken = 0
        self._X: list[Tensor] = []
        self._Y: list[Tensor] = []
        self._removals: list[RemovableHandle] = []
        self._before(weight, self._change_weight)

    def add(self, module: nn.Module, trained: Callable[[Tensor], bool]) -> None:
        """Add a module that multiplies with the weight; a trained bias of it is preconditioned, too."""
        self._modules.append(module)
        self._removals.append(module.register_forward_hook(Watch(self._saw)))
        bias = module.bias
        if isinstance(bias, nn.Parameter) and trained(bias) and not any(bias is b for b in self._biases):
            self._biases.append(bias)
            self._before(bias, self._change_bias)

    def remove(self) -> list[nn.Module]:
        """Remove the hooks, and return the modules that had them."""
        for removal in self._removals:
            removal.remove()
        return self._modules

    @torch.no_grad()
    def fold(self, pending: Arrivals) -> None:
        """Update the estimates for inputs and for output derivatives with rows observed since last time.

        `pending` collects the values that the host has to read from the device.
        """
        if self._X:
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            self.inputs.look_at(torch.cat(self._X).to(dtype), pending)
            self.outputs.look_at(torch.cat(self._Y).to(dtype), pending)
        self._X.clear()
        self._Y.clear()
        self._taken = 0

    def prepare(self, t: int, *, due: bool) -> None:
        """Prepare for step `t`; `due`: observe a minibatch in it."""
        self.due = due or not self.inputs.is_known
        self._shift = math.modf(t * math.sqrt(2))[0]

    def state_dict(self) -> dict[str, Any]:
        return {"inputs": self.inputs.state_dict(), "outputs": self.outputs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load a result of `state_dict`, or an empty one; return whether it fits this layer."""
        D_out = len(self.weight)
        D_in = self.weight.numel() // max(D_out, 1)
        found = self.inputs.load_state_dict(state["inputs"], self.weight, D_in)
        return self.outputs.load_state_dict(state["outputs"], self.weight, D_out) and found

    def _before(self, param: nn.Parameter, change: Callable[[Tensor], Tensor | None]) -> None:
        """Let `change` replace the gradient of `param` before torch adds it to `.grad`."""
        handle = cast(RemovableHandle, param.register_hook(change))  # pyright: ignore[reportUnknownMemberType]
        self._removals.append(handle)

    def _saw(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Select input rows of a forward pass; they are kept once their output derivatives are computed."""
        if not self.due or self._taken >= ROWS:
            return
        if not (args and isinstance(output, Tensor) and output.requires_grad):
            return
        with torch.no_grad():
            X = input_rows(module, args[0].detach(), ROWS, self._shift)
        if X is not None and X.numel():
            self._taken += len(X)
            output.register_hook(functools.partial(self._came_back, module, X))  # pyright: ignore[reportUnknownMemberType]

    def _came_back(self, module: nn.Module, X: Tensor, g: Tensor) -> None:
        if not torch.is_grad_enabled():  # with create_graph, g would be a higher derivative
            self._X.append(X)
            self._Y.append(output_rows(module, g, ROWS, self._shift))

    def _change_weight(self, g: Tensor) -> Tensor | None:
        return _changed(g, self.outputs.shrinkage, self.inputs.shrinkage)

    def _change_bias(self, g: Tensor) -> Tensor | None:
        return _changed(g, self.outputs.shrinkage, None)


def _changed(g: Tensor, left: Shrinkage | None, right: Shrinkage | None) -> Tensor | None:
    """Return the natural gradient for g [D_out, …], or None to leave g unchanged."""
    known = left or right
    if known is None or torch.is_grad_enabled() or g.layout != torch.strided:
        return None
    found = natural(g.reshape(len(g), -1).to(known.R), left, right)
    return None if found is None else found.view(g.shape).to(g)
