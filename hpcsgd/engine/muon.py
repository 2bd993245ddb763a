"""Muon for a model's hidden matrices, AdamW for the rest.

K. Jordan et al.: Muon: An optimizer for hidden layers in neural networks, 2024; J. Liu et al.: Muon is
Scalable for LLM Training, https://arxiv.org/abs/2502.16982. The second paper scales Muon's updates to the
size of AdamW's (section 2.2, torch's `adjust_lr_fn="match_rms_adamw"`). So both optimizers can have one
learning rate and one weight decay. Muon is torch's own, in torch 2.9 and later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn, optim

from hpcsgd.arguments import checked
from hpcsgd.core.matrices import embeddings_of
from hpcsgd.engine.chained import ChainedOptimizer
from hpcsgd.engine.muon_by_rows import PERIOD
from hpcsgd.errors import UserError


@checked
def muon(
    model: nn.Module,
    lr: float,
    *,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    period: int = 1,
    hidden: str | Sequence[str] | None = None,
    rest: Mapping[str, Any] | None = None,
) -> ChainedOptimizer:
    """Return one optimizer: torch's Muon for hidden matrices of `model`, its AdamW for the rest.

    Matrices are real trainable parameters with two dimensions. By default hidden ones are all except
    embeddings and the model's last matrix, which is taken for the output layer.

    Args:
        model: The model to train.
        lr: Learning rate of both optimizers; choose it as for AdamW.
        momentum: Muon's momentum. Default 0.95.
        weight_decay: Weight decay of both optimizers. Default 0.1.
        nesterov: True: Muon uses Nesterov momentum. Default True.
        ns_steps: Newton-Schulz iterations per update. Default 5.
        adjust_lr_fn: How Muon's rate depends on the shape, as in torch. Default 'match_rms_adamw': updates
            are as large as AdamW's. With 'original' Muon's rate is far larger: give `rest` its own `lr`.
        period: For FSDP models, P of MuonBP (A. Khaled et al., arXiv:2510.16981): every P-th step
            orthogonalizes whole matrices. In other steps each rank orthogonalizes its own rows and sends
            nothing. The paper takes 5. Ranks of other models have whole matrices, so for them `period`
            changes nothing. Default 1: whole in every step.
        hidden: Names of the matrices that Muon trains, such as "blocks.*". Default None: see above.
        rest: Arguments of AdamW, such as other values of `lr` and `weight_decay`. Default None.

    Returns:
        A `ChainedOptimizer` for `DistributedOptimizer`.

    Raises:
        UserError: If torch is older than 2.9, a number is out of bounds, or there is no hidden matrix.

    Example:
        >>> inner = hpcsgd.muon(model, lr=0.002, hidden=["*.weight"], rest={"weight_decay": 0.0})
        >>> optimizer = hpcsgd.DistributedOptimizer(inner, model, topology, hpcsgd.hierarchical(sync_every=8))
        >>> train(optimizer, steps=2)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.1, 0.0]

    References:
        K. Jordan et al., 2024; J. Liu et al., 2025, https://arxiv.org/abs/2502.16982.
    """
    for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise UserError(f"muon: {name} = {value}: expected a number ≥ 0")
    if momentum >= 1:
        raise UserError(f"muon: momentum = {momentum}: expected a number ≥ 0 and < 1")
    if not 1 <= ns_steps < 100:
        raise UserError(f"muon: ns_steps = {ns_steps}: expected a number of iterations from 1 to 99")
    if period < 1:
        raise UserError(f"muon: period = {period}: expected a number of steps ≥ 1")
    kind = getattr(optim, "Muon", None)
    if kind is None:
        raise UserError(f"muon: torch {torch.__version__} has no Muon: it needs torch 2.9 or later")
    matrices = hidden_matrices(model, hidden)
    chosen = set(matrices)
    others = [p for p in model.parameters() if p.requires_grad and p not in chosen]
    options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
    parts: list[optim.Optimizer] = [kind(matrices, lr=lr, weight_decay=weight_decay, **options)]
    if period > 1:
        parts[0].param_groups[0][PERIOD] = period
    if others:
        given: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, **(rest or {})}
        if isinstance(given.get("betas"), list):  # a job file gives a list
            given["betas"] = tuple(given["betas"])
        try:
            parts.append(optim.AdamW(others, **given))
        except (IndexError, TypeError, ValueError) as error:
            raise UserError(f"muon: rest = {dict(rest or {})}: AdamW does not take it: {error}") from error
    return ChainedOptimizer(*parts)


def hidden_matrices(model: nn.Module, hidden: str | Sequence[str] | None = None) -> list[nn.Parameter]:
    """Return the matrices for Muon: those named by `hidden`, or all except embeddings and the last one."""
    named = {name: p for name, p in model.named_parameters() if is_matrix(p)}
    if hidden is None:
        apart = _embeddings_and_output(model)
        found = [p for p in named.values() if p not in apart]
    else:
        hidden = [hidden] if isinstance(hidden, str) else hidden
        for pattern in hidden:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise UserError(f"muon: hidden: no trainable matrix of the model is called {pattern!r}")
        found = [p for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in hidden)]
    if not found:
        raise UserError("muon: the model has no hidden matrices; name them in `hidden`, or use AdamW")
    return found


def is_matrix(p: nn.Parameter) -> bool:
    """Return whether `p` is a real trainable parameter with two dimensions, as Muon needs."""
    return p.requires_grad and p.dim() == 2 and not p.is_complex()


def _embeddings_and_output(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of embeddings, and the last matrix; a tied weight is both."""
    own = [p for m in model.modules() for p in m.parameters(recurse=False) if p.dim() == 2]
    return {*embeddings_of(model), *own[-1:]}
