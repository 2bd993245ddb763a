"""Test whether the model fits the data before a run writes anything, so that the error is one line."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcsgd.data import Split
from hpcsgd.errors import UserError
from hpcsgd.models import is_known
from hpcsgd.models.sharded import META
from hpcsgd.train.tasks import Task


def require_model_fits(model: nn.Module, data: Split, task: Task, name: str, device: torch.device) -> None:
    """Raise `UserError` unless `model`, built by `name`, gives scores for two samples that fit `task`.

    The model is on `device`. Exceptions of a user's own model pass through, because their traceback says
    more. A user's own model is not tested on the meta device, because it may read the values of tensors.
    """
    if device == META and not is_known(name):
        return
    x = data.trial()
    try:
        scores = _scores(model, x.to(device))
    except (RuntimeError, IndexError, ValueError) as error:
        if not is_known(name):
            raise
        raise UserError(
            f"[model]: {name} does not take samples of shape {list(x.shape[1:])}{_numbers(x)}: {error}",
            key=("model",),
        ) from error
    if not isinstance(scores, Tensor):
        raise UserError(
            f"[model]: {name} gives a {type(scores).__name__}, expected a tensor of scores", key=("model",)
        )
    task.require(scores, x, name)


def _numbers(x: Tensor) -> str:
    """Return text for an error message: the largest number in `x` if it has integers, otherwise nothing.

    Integers are indices, such as tokens or users, and an embedding of the model may be too short for them.
    """
    return "" if x.is_floating_point() else f" with numbers up to {x.max().item()}"


def _scores(model: nn.Module, x: Tensor) -> object:
    """Return the model's scores for x in evaluation mode; the model and random states do not change."""
    model.eval()
    with torch.no_grad():
        scores = model(x)
    model.train()
    return scores
