"""`NaturalGradient`: an optimizer that uses natural gradients of linear and convolution layers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

from torch import Tensor, nn, optim

from hpcsgd import torch_private
from hpcsgd.arguments import checked
from hpcsgd.comm.on_host import Arrivals
from hpcsgd.core.fsdp import is_fsdp
from hpcsgd.engine.natural_gradient.layer import Layer
from hpcsgd.engine.natural_gradient.rows import weight_of
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.wrapping import OuterWrapper
from hpcsgd.errors import UserError

log = logging.getLogger(__name__)

EVERY_TIME = 10
"""Number of first steps in which all estimates are updated."""

_taken: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that a `NaturalGradient` already preconditions."""


@checked
class NaturalGradient(torch_private.DecidesScaling, OuterWrapper):
    """An optimizer that uses natural gradients of linear and convolution layers; the outermost wrapper.

    The gradient of each such layer is multiplied from both sides by inverses of Fisher matrices: those of its
    inputs, and of the derivatives of its outputs. These matrices are estimated online. The result is scaled
    to the norm of the gradient. `fisher.py` has the equations and the differences from the paper.

    Each rank preconditions its own gradient with its own estimates, before the reduction. A gradient that is
    zero or not finite stays unchanged. Minibatches that are not finite are not counted.

    Schedulers, `param_groups` and step hooks of `optimizer` keep working. Its other members, such as
    `averaged_model`, `clip_grad_norm_`, `t` and `metrics`, are available here, too.

    Args:
        optimizer: A plain optimizer or a `DistributedOptimizer`. Layers that it does not train are ignored.
        model: The model. Ignored layers: grouped and transposed convolutions, layers with parametrized or
            frozen weights, and layers that no backward pass reaches. Biases use output derivatives only.
        rank: Directions that an estimate stores one by one (r); at most D − 1 for D dimensions. Default 20.
        alpha: Multiple of the mean eigenvalue that is added to all eigenvalues (α), at least 0. A lower value
            changes gradients more. Default 4.0.
        history: Rows over which an estimate forgets (N_S), above 0. A row is a sample, or one position of a
            sample. Default 2000.0.
        every: Steps between two updates of an estimate, except in the first ten steps. More steps cost less
            time. Default 4.

    Raises:
        UserError: If an argument is outside these bounds, or there is no layer to precondition, or one is
            preconditioned already.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> optimizer = hpcsgd.NaturalGradient(optimizer, model, rank=2)
        >>> train(optimizer, steps=2)
        >>> optimizer.t, len(optimizer.layers)
        (2, 2)

    References:
        D. Povey, X. Zhang, S. Khudanpur: Parallel training of DNNs with Natural Gradient and Parameter
        Averaging, 2014 (arXiv:1410.7455).
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        model: nn.Module,
        *,
        rank: int = 20,
        alpha: float = 4.0,
        history: float = 2000.0,
        every: int = 4,
    ) -> None:
        if rank < 1 or every < 1 or not alpha >= 0 or not history > 0:
            raise UserError(
                f"NaturalGradient of rank = {rank}, alpha = {alpha}, history = {history}, every = {every}: "
                "needs rank ≥ 1, alpha ≥ 0, history > 0, every ≥ 1"
            )
        if isinstance(optimizer, OuterWrapper):
            raise UserError(f"the optimizer is a {type(optimizer).__name__} already")
        self.optimizer = optimizer
        self._every = every
        self._t = 0
        self._laid_out = False
        self.layers = _layers(optimizer, model, rank, alpha, history)
        self._prepare()
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self._laid_out = True
        self._join()
        # A pre-hook runs before the update, so gradients may still be under way meanwhile.
        self._removal = optimizer.register_step_pre_hook(self._fold)

    def step(self, closure: Callable[[], Any] | None = None, *, loss: float | Tensor | None = None) -> Any:
        """Make one step of the wrapped optimizer, with `closure`; collective if the wrapped step is.

        `loss`: loss of this rank's batch, for methods that use it, if no `closure` returns it. A plain
        optimizer ignores it.
        """
        if isinstance(self.optimizer, DistributedOptimizer):
            return self.optimizer.step(closure, loss=loss)
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call `zero_grad` of the wrapped optimizer with this `set_to_none`."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with this rank's estimates as `natural_gradient`."""
        return {**self.optimizer.state_dict(), "natural_gradient": self.estimates()}

    def consolidate_state_dict(self, to: int = 0) -> NoReturn:
        """Refuse to gather the state on rank `to`: each rank has estimates of its own."""
        raise UserError(
            f"consolidate_state_dict: to = {to}: estimates of natural gradients are of each rank: save by "
            "hpcsgd.save, or save state_dict() on every rank, each in a file of its own"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load `state_dict`: a result of `state_dict()`, or the state of the wrapped optimizer alone."""
        rest = {key: value for key, value in state_dict.items() if key != "natural_gradient"}
        self.optimizer.load_state_dict(rest)
        self._join()
        self.resume_from(state_dict.get("natural_gradient"))

    def estimates(self) -> dict[str, Any]:
        """Return the Fisher estimates of this rank, as nested dicts of tensors and numbers."""
        return {"t": self._t, "layers": {layer.name: layer.state_dict() for layer in self.layers}}

    def resume_from(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from `saved`, a result of `estimates`.

        Estimates that are missing there, or have another rank or size, start afresh.
        """
        saved = {"t": 0, "layers": {}} if saved is None else saved
        self._t = saved["t"]
        nothing: dict[str, Any] = {"inputs": {}, "outputs": {}}
        afresh = [
            layer.name
            for layer in self.layers
            if layer.name not in saved["layers"] or not layer.load_state_dict(saved["layers"][layer.name])
        ]
        for layer in self.layers:
            if layer.name in afresh:
                layer.load_state_dict(nothing)
        if afresh:
            log.info(
                "natural gradient: no saved estimates of this rank for %d of %d layers: they start afresh",
                len(afresh),
                len(self.layers),
            )
        self._prepare()

    def remove(self) -> None:
        """Leave gradients unchanged from now on, so that the model can get another `NaturalGradient`."""
        self._removal.remove()
        for layer in self.layers:
            for module in layer.remove():
                _taken.discard(module)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a `param_group` after the wrapping, because the layers have been chosen."""
        if self._laid_out:
            raise UserError("add_param_group after NaturalGradient was made: add it to the optimizer before")
        super().add_param_group(param_group)

    def _answer_scaler(self) -> bool:
        """Let the wrapped optimizer decide if torch's GradScaler leaves scaled gradients to it."""
        return torch_private.scales_gradients(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the wrapped optimizer, because this class has none of that name."""
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def _join(self) -> None:
        """Share the wrapped optimizer's `param_groups` and `state`; loading may replace these objects."""
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def _fold(self, *_: object) -> None:
        pending = Arrivals()
        for layer in self.layers:
            layer.fold(pending)
        self._t += 1
        if self._t == EVERY_TIME and not any(layer.inputs.is_known for layer in self.layers):
            log.warning("natural gradient: no layer saw a minibatch: gradients stay as they are")
        self._prepare()

    def _prepare(self) -> None:
        """Choose the layers to update; they take turns, so that no step is much longer than the others."""
        for i, layer in enumerate(self.layers):
            layer.prepare(self._t, due=self._t < EVERY_TIME or (self._t + i) % self._every == 0)


def _layers(
    optimizer: optim.Optimizer, model: nn.Module, rank: int, alpha: float, history: float
) -> list[Layer]:
    if isinstance(optimizer, DistributedOptimizer):
        params = [param for _, param in optimizer.trained]  # its param_groups hold parts of parameters
    else:
        params = [param for group in optimizer.param_groups for param in group["params"]]
    theirs = {id(param) for param in params if param.requires_grad}

    def trained(param: Tensor) -> bool:
        return id(param) in theirs

    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    found = [(name, m, w) for name, m in modules if (w := weight_of(m)) is not None]
    found = [(name, module, weight) for name, module, weight in found if trained(weight)]
    if not found:
        raise UserError("NaturalGradient: the optimizer trains no linear or convolution layer of the model")
    for name, module, weight in found:
        if is_fsdp(weight):
            where = name or "the model"
            raise UserError(f"NaturalGradient: torch has sharded {where}: leave one of them out")
        if weight.is_complex():
            raise UserError(
                f"NaturalGradient: the weight of {name or 'the model'} is of {weight.dtype}, and estimates "
                "are of real numbers: leave it out, or that layer out of the optimizer"
            )
        if module in _taken:
            raise UserError(
                f"gradients of {name or 'the model'} are natural already: remove() the first NaturalGradient"
            )
    layers: dict[int, Layer] = {}
    for name, module, weight in found:
        if id(weight) not in layers:
            layers[id(weight)] = Layer(name or "the model", weight, rank, alpha, history)
        layers[id(weight)].add(module, trained)
        _taken.add(module)
    return list(layers.values())
