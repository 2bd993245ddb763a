"""A check that several ranks can train a model as one process would, before its optimizer is wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpcsgd.errors import UserError


def require_distributable(model: nn.Module, trained: Iterable[tuple[str, nn.Parameter]], ranks: int) -> None:
    """Raise `UserError` for a `model` that several ranks would train differently from one process.

    With one rank a model on the meta device is allowed, to check whether everything fits together.
    """
    _require_memory_of_its_own(model, trained)
    if ranks > 1:
        _require_values(model)
        _require_synchronized(model)
        _require_untouched_by_forward(model)


def _require_memory_of_its_own(model: nn.Module, trained: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse trained parameters that share memory, because each is moved into its part of a flat vector."""
    theirs = dict(trained)
    rest = {name: x for name, x in _tensors(model) if name not in theirs}
    spans = [(*_span(x), name) for name, x in [*theirs.items(), *rest.items()] if _has_memory(x)]
    last: tuple[str, int, int, str] | None = None
    for span in sorted(spans):
        overlaps = last is not None and last[0] == span[0] and span[1] < last[2]
        if last is not None and overlaps and (span[3] in theirs or last[3] in theirs):
            raise UserError(
                f"{last[3]} and {span[3]} share memory, which they would not after the wrapping: to tie two "
                "parameters assign one nn.Parameter to both modules, else give each a clone()"
            )
        if last is None or not overlaps or span[2] > last[2]:
            last = span


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _has_memory(x: Tensor) -> bool:
    """Return whether `x` has memory of its own, which shards and other wrappers of tensors do not have."""
    return x.layout == torch.strided and not x.is_meta and x.numel() > 0 and type(x.detach()) is Tensor


def _span(x: Tensor) -> tuple[str, int, int]:
    """Return the device of `x`, the address of its first byte, and the address behind its last."""
    end = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.size(), strict=True))
    return str(x.device), x.data_ptr(), x.data_ptr() + (end + 1) * x.element_size()


def _require_synchronized(model: nn.Module) -> None:
    """Refuse torch's SyncBatchNorm without a process group.

    It would silently use the samples of one rank, or those of all groups.
    """
    for name, module in _modules(model):
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            raise UserError(
                f"{name} is torch's SyncBatchNorm and has no process group: call "
                "hpcsgd.sync_batch_norm(model, topology) before"
            )


def _require_untouched_by_forward(model: nn.Module) -> None:
    """Refuse embeddings that scale rows in place: only the rank that looks rows up would scale them."""
    for name, module in _modules(model):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserError(
                f"{name} has max_norm = {module.max_norm:g}, by which each rank changes the rows that it "
                "looks up, and no other rank does: leave max_norm out, and call "
                f"weight.data.renorm_({module.norm_type:g}, 0, {module.max_norm:g}) after step() on all ranks"
            )


def _modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name or "the model", module) for name, module in cast(Any, model).named_modules())


def _require_values(model: nn.Module) -> None:
    named = [("parameter", *each) for each in model.named_parameters()]
    named += [("buffer", *each) for each in model.named_buffers()]
    for kind, name, x in named:
        if x.device.type == "meta":
            raise UserError(
                f"{kind} {name} is on the meta device: give it values before the optimizer is wrapped"
            )
