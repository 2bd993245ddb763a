"""Batch norm with the mean and variance of the samples of all ranks of a group together.

`torch.nn.SyncBatchNorm` does the same, but needs a process group of torch.distributed and tensors on GPUs.
This one uses the ranks of a topology, on CPUs, too. Let rank i have n_i values of a channel, with mean m_i
and sum of squared deviations M_i. All ranks together have, by T. F. Chan et al.: Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances, 1979,

    n = Σ n_i,   m = Σ n_i m_i / n,   M = Σ M_i + n_i (m_i − m)²,   variance M / n.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpcsgd import torch_private
from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, phase
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError
from hpcsgd.torch_private import BatchNorm

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The classes of the layers that can be replaced. Subclasses are excluded: they may compute anything."""


@checked
def sync_batch_norm(model: nn.Module, topology: Topology) -> nn.Module:
    """Let the batch norm layers of `model` use the samples of all ranks of a group; collective.

    In training each layer sends a few numbers per channel: by an allgather in the forward pass, and by an
    allreduce in the backward pass. In evaluations nothing is sent. The new layers take over parameters,
    buffers and hooks of those they replace. Call it before you make the `DistributedOptimizer`. Layers made
    by `torch.nn.SyncBatchNorm.convert_sync_batchnorm` are replaced, too.

    Args:
        model: Any model. Its `BatchNorm1d`, `2d` and `3d`, and torch's `SyncBatchNorm`, are replaced.
        topology: The ranks and groups, from `init`.

    Returns:
        The model. If it is itself a batch norm layer, the new layer.

    Raises:
        UserError: If the model has none of these layers, or a batch norm layer that cannot be replaced: of a
            subclass, lazy, with parametrized weights or a `forward` of its own.

    Example:
        >>> net = torch.nn.Sequential(model, torch.nn.BatchNorm1d(3))
        >>> net = hpcsgd.sync_batch_norm(net, topology)
        >>> net(torch.ones(5, 4)).shape
        torch.Size([5, 3])

    References:
        S. Ioffe, C. Szegedy: Batch Normalization: Accelerating Deep Network Training by Reducing Internal
        Covariate Shift, 2015 (arXiv:1502.03167).
    """
    plain = [layer for name, layer in model.named_modules() if _is_plain(layer, name, model)]
    if not plain:
        raise UserError(
            f"sync_batch_norm: {type(model).__name__} has no BatchNorm1d, 2d, 3d or SyncBatchNorm"
        )
    ranks = topology.intra_group.dup_with_thread()  # own thread: gradients use intra_group in another order
    replaced: dict[nn.Module | None, nn.Module] = {layer: SyncBatchNorm(layer, ranks) for layer in plain}
    for module in list(model.modules()):
        for name, layer in torch_private.tables_of(module)[1].items():
            if layer in replaced:
                setattr(module, name, replaced[layer])
    return replaced.get(model, model)


def _is_plain(layer: nn.Module, name: str, model: nn.Module) -> TypeGuard[BatchNorm]:
    """Return whether `layer` is to be replaced. Raises `UserError` for a batch norm layer that cannot be."""
    if not isinstance(layer, BatchNorm) or isinstance(layer, SyncBatchNorm):
        return False
    if type(layer) not in PLAIN:
        more = f"is a {type(layer).__name__}, which may compute something else than batch norm"
    elif not {name for name, _ in layer.named_parameters()} <= {"weight", "bias"} or [*layer.children()]:
        more = "has weights that are computed from other parameters"
    elif "forward" in vars(layer):
        more = "has a forward of its own"
    else:
        return True
    raise UserError(
        f"sync_batch_norm: layer {name or type(model).__name__} {more}: only plain BatchNorm1d, 2d, 3d and "
        "SyncBatchNorm can be replaced (a lazy one is plain after its first batch)"
    )


class SyncBatchNorm(BatchNorm):
    """A batch norm layer that uses the samples of all `ranks`, made from the `layer` that it replaces.

    It gets all attributes of `layer`.
    """

    def __init__(self, layer: BatchNorm, ranks: Communicator) -> None:
        super().__init__(layer.num_features)
        self.__dict__.update(layer.__dict__)
        self._ranks = ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Return a copy of the layer that uses the same ranks, for example in a moving average of a model."""
        memo[id(self._ranks)] = self._ranks
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __getstate__(self) -> NoReturn:
        raise UserError(
            "a model with layers of hpcsgd.sync_batch_norm cannot be pickled: save its state_dict()"
        )

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch calls it so
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch calls it so
        """Normalize `input`, in training with the mean and variance of the samples of all ranks."""
        if self._ranks.size == 1 or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        momentum = self._factor()
        return _Normalize.apply(
            input,
            self.weight,
            self.bias,
            self.eps,
            self.running_mean,
            self.running_var,
            momentum,
            self._ranks,
        )

    def _factor(self) -> float:
        """Count this step, and return the weight of the batch's mean and variance in the running ones."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class _Normalize(Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        ranks: Communicator,
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        n, mean, M = _together(wide, ranks)
        if n < 2:
            raise ValueError(
                f"expected more than 1 value per channel when training, got size {list(x.shape)}"
            )
        scale = torch.rsqrt(M / n + eps)
        centred = wide - _per_channel(mean, x)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((M / (n - 1)).to(running_var.dtype), momentum)
        ctx.save_for_backward(centred, scale, weight)
        ctx.n, ctx.ranks, ctx.dtype = n, ranks, x.dtype
        out = centred * _per_channel(scale if weight is None else scale * weight, x)
        if bias is not None:
            out += _per_channel(bias, x)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        centred, scale, weight = ctx.saved_tensors
        wide = dy.to(centred.dtype)
        others = [d for d in range(dy.dim()) if d != 1]
        sums = torch.stack([wide.sum(others), (wide * centred).sum(others)])
        of_bias, of_weight = sums[0].clone(), sums[1] * scale
        with phase("batch norm"):
            ctx.ranks.allreduce(sums, "sum").wait()
        along = sums[1] / ctx.n * scale.square()
        dx = wide - _per_channel(sums[0] / ctx.n, dy) - centred * _per_channel(along, dy)
        dx *= _per_channel(scale if weight is None else scale * weight, dy)
        asks = ctx.needs_input_grad
        return (
            dx.to(ctx.dtype) if asks[0] else None,
            None if weight is None or not asks[1] else of_weight.to(weight.dtype),
            None if weight is None or not asks[2] else of_bias.to(weight.dtype),
            None, None, None, None, None,
        )  # fmt: skip


def _together(x: Tensor, ranks: Communicator) -> tuple[float, Tensor, Tensor]:
    """Return n, m and M of the module docstring over all ranks; m and M have one value per channel.

    n is the number of values of a channel, m their mean, and M the sum of their squared deviations from m.
    Collective.
    """
    flat = x.transpose(0, 1).reshape(x.size(1), -1)
    mean = flat.mean(1) if flat.size(1) else flat.new_zeros(flat.size(0))
    M = (flat - mean[:, None]).square().sum(1)
    mine = torch.cat([flat.new_tensor([flat.size(1)]), mean, M])
    everyone = mine.new_empty(ranks.size * mine.numel())
    with phase("batch norm"):
        ranks.allgather(everyone, mine).wait()
    counts, means, squares = everyone.view(ranks.size, -1).split([1, x.size(1), x.size(1)], dim=1)
    n = counts.sum()
    mean = (counts * means).sum(0) / n
    return float(n), mean, squares.sum(0) + (counts * (means - mean).square()).sum(0)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
