"""Error feedback: elements that were not sent are kept and added to the next gradient, not lost.

Every worker has one vector acc, as long as the whole model. Each gradient g is added to the rest e that the
step before did not send (acc = e + g). Elements that are sent are set to zero in acc, and what remains is the
e of the next step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, optim

from hpcsgd import kernels
from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import ReduceContext
from hpcsgd.errors import UserError


@runtime_checkable
class Feedback(Protocol):
    """A kind of error feedback: what is added to the accumulated gradient, and what the optimizer gets.

    The accumulated gradient is the vector acc of each worker, with one element for each of the model.
    """

    def require_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Raise `UserError` for an optimizer with which the update would be wrong."""
        ...

    def before(self, d: ReduceContext, g: Tensor, velocity: Tensor | None) -> Tensor:
        """Return what is added to the accumulated gradient for the gradient `g`.

        The result is `g` itself, which may change, or a new tensor, so that nothing is rounded to 16 bits.
        `velocity` is the part for `g` of the worker's second vector; None if this kind does not need one.
        """
        ...

    def after(self, d: ReduceContext, mean: Tensor) -> None:
        """Change `mean`, the mean of the values that workers sent, in place before the optimizer gets it."""
        ...

    @property
    def velocity(self) -> bool:
        """True if each worker keeps a second vector in addition to acc, the accumulated gradient.

        An example is a momentum. The second vector is as long as acc. When elements of acc have been sent,
        the same elements of the second vector are set to zero, as those of acc are.
        """
        ...


@dataclass(frozen=True)
class ErrorFeedback:
    """Error feedback acc = e + g; learning rate, momentum and weight decay act on the mean that was sent.

    The code of DEFT's authors does the same. For plain SGD at a constant learning rate it equals algorithm 1
    of their paper.
    """

    velocity = False

    def require_optimizer(self, optimizer: optim.Optimizer) -> None:
        pass

    def before(self, d: ReduceContext, g: Tensor, velocity: Tensor | None) -> Tensor:
        return g

    def after(self, d: ReduceContext, mean: Tensor) -> None:
        pass


@checked
@dataclass(frozen=True)
class LrInErrorFeedback:
    """Error feedback in which the learning rate acts before the selection, for plain SGD only.

    acc = e + η·g, where g is the gradient and e the rest of the step before; then w −= mean of what was sent.
    η is the learning rate, including warm-up, at the time when the gradients are sent. A learning rate that
    is set between `backward()` and `step()` also scales what is sent. At a constant learning rate this equals
    the default, `ErrorFeedback()`.

    Raises:
        UserError: At the first reduction, if the optimizer is not SGD, or has momentum, weight decay or
            maximize; in a step with several learning rates or with 0.

    Example:
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.TopK(density=0.1), feedback=hpcsgd.LrInErrorFeedback())
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["error"] > 0
        True

    References:
        D. Yoon, S. Oh: DEFT, ICPP 2023, algorithm 1, to the letter.

    See Also:
        `MomentumCorrection`: has momentum before the selection.
    """

    velocity = False

    def require_optimizer(self, optimizer: optim.Optimizer) -> None:
        _require_plain_sgd("lr_in_error_feedback", optimizer, ("momentum", "weight_decay", "maximize"))

    def before(self, d: ReduceContext, g: Tensor, velocity: Tensor | None) -> Tensor:
        return g.to(accumulation_dtype(g.dtype)).mul_(self._rate(d))

    def after(self, d: ReduceContext, mean: Tensor) -> None:
        mean.div_(self._rate(d))

    def _rate(self, d: ReduceContext) -> float:
        if len(set(d.rates)) > 1:
            raise UserError(
                f"feedback lr_in_error_feedback: one learning rate for all, not {sorted(set(d.rates))}"
            )
        if d.rates[0] == 0:
            raise UserError(
                "feedback lr_in_error_feedback: what is sent at a learning rate of 0 would be lost"
            )
        return d.rates[0]


@checked
@dataclass(frozen=True)
class MomentumCorrection:
    """Error feedback with momentum of each worker before the selection: u = m·u + g; acc = e + u.

    g is the gradient, u the momentum, and e the rest of the step before. u is set to zero where acc is.
    Elements that wait to be sent gather momentum meanwhile. The optimizer's own momentum must be 0, because
    it would be a second one, on what was sent.

    Args:
        momentum: The factor m, ≥ 0 and < 1. The momentum of dense training is a good start.

    Raises:
        UserError: If `momentum` is outside these bounds; at the first reduction, if the optimizer is not SGD
            or has momentum.

    Shape:
        M parameters in total. A worker keeps another M elements, the momentum u.

    Example:
        >>> feedback = hpcsgd.MomentumCorrection(momentum=0.9)
        >>> grad_reduce = hpcsgd.Sparse(hpcsgd.TopK(density=0.1), feedback=feedback)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.bsp(grad_reduce))
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["error"] > 0
        True

    References:
        Y. Lin et al.: Deep Gradient Compression, ICLR 2018, section 3: momentum correction and momentum
        factor masking.

    See Also:
        `LrInErrorFeedback`: the learning rate before the selection.
    """

    momentum: float
    velocity = True

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UserError(
                f"momentum = {self.momentum}: expected a number ≥ 0 and < 1",
                key="momentum",
                value=self.momentum,
            )

    def require_optimizer(self, optimizer: optim.Optimizer) -> None:
        _require_plain_sgd("momentum_correction", optimizer, ("momentum",))

    def before(self, d: ReduceContext, g: Tensor, velocity: Tensor | None) -> Tensor:
        assert velocity is not None
        velocity.mul_(self.momentum).add_(g)
        return g.copy_(velocity) if g.dtype == velocity.dtype else velocity.clone()

    def after(self, d: ReduceContext, mean: Tensor) -> None:
        pass


FEEDBACKS: Mapping[str, Callable[..., Feedback]] = {
    "error_feedback": ErrorFeedback,
    "momentum_correction": MomentumCorrection,
    "lr_in_error_feedback": LrInErrorFeedback,
}
"""The kinds of error feedback, by their names in job files."""


class Residual:
    """The accumulated gradient acc of one worker: float32, or float64 if any parameter is float64.

    With `velocity` there is a second vector like it; see `Feedback.velocity`.
    """

    def __init__(self, buckets: Sequence[Bucket], velocity: bool) -> None:
        devices = {b.w.device for b in buckets}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise UserError(f"Sparse: parameters on {names}: they have to be on one device")
        sizes = [slot.stop - slot.start for b in buckets for slot in b.slots]
        self.layers = torch.tensor([0, *sizes], device="cpu").cumsum(0)
        """The positions (int64) in acc at which the parameters begin, and the end of the last one."""
        self._names = [slot.name for b in buckets for slot in b.slots]
        starts = [0, *itertools.accumulate(b.slots[-1].stop for b in buckets)]
        self.spans = [slice(*ends) for ends in itertools.pairwise(starts)]
        """For each bucket, the slice of acc that belongs to it."""
        dtype = torch.float64 if any(b.w.dtype == torch.float64 for b in buckets) else torch.float32
        self.acc = torch.zeros(starts[-1], dtype=dtype, device=buckets[0].w.device)
        self.velocity = torch.zeros_like(self.acc) if velocity else None
        self._stops = torch.tensor(starts[1:], device=self.acc.device)

    def take_in(self, g: Tensor, i: int, bounds: Tensor) -> Tensor:
        """Add the gradient `g` of bucket i to acc, and set `g` to zero.

        Return the squared norm (float64) of each of the bucket's layers in acc. `bounds` are the positions in
        acc at which layers begin and end.
        """
        span = self.spans[i]
        inside = bounds[(bounds >= span.start) & (bounds <= span.stop)] - span.start
        if g.dtype != torch.float64 and self.acc.dtype == torch.float64:
            moved = g.double()
            g.zero_()
            g = moved
        return kernels.accumulate(self.acc[span], g, inside)

    def put_into(self, buckets: Sequence[Bucket], indices: Tensor, values: Tensor) -> None:
        """Write `values` into the gradients, which are zero, at the elements that have `indices` in acc.

        The `indices` are in ascending order. The host waits for the gradients' device.
        """
        before = torch.searchsorted(indices, self._stops).tolist()
        counts = [stop - start for start, stop in itertools.pairwise([0, *before])]
        parts = zip(indices.split(counts), values.split(counts), strict=True)
        for b, span, (where, what) in zip(buckets, self.spans, parts, strict=True):
            b.g[where - span.start] = what.to(b.g.dtype)

    def release(self, indices: Tensor) -> None:
        """Set acc, and `velocity` if there is one, to zero at `indices`, whose values have been sent."""
        self.acc.index_fill_(0, indices, 0)
        if self.velocity is not None:
            self.velocity.index_fill_(0, indices, 0)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return acc, and `velocity` if there is one, by name, each as one tensor per parameter name."""
        vectors = {"acc": self.acc} if self.velocity is None else {"acc": self.acc, "velocity": self.velocity}
        return {name: dict(zip(self._names, self._by_layer(x), strict=True)) for name, x in vectors.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the vectors that `state_dict` returned, and set those to zero that `state` lacks.

        A state that was saved before the first reduction is empty, and another kind of error feedback may
        have had one vector only.
        """
        for name, layers in self.state_dict().items():
            for layer, own in layers.items():
                own.copy_(state[name][layer]) if name in state else own.zero_()

    def _by_layer(self, x: Tensor) -> Sequence[Tensor]:
        return x.split(self.layers.diff().tolist())


def _require_plain_sgd(name: str, optimizer: optim.Optimizer, without: tuple[str, ...]) -> None:
    if type(optimizer) is not optim.SGD:
        raise UserError(f"feedback {name} is for SGD, not for {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        for key in without:
            if group[key]:
                raise UserError(f"feedback {name}: the optimizer must not have {key} = {group[key]}")
