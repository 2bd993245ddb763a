"""Does the model fit the data? Asked before anything is written, when the answer is still one clear line."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcsgd.data import Split
from hpcsgd.errors import UserError
from hpcsgd.models import is_known
from hpcsgd.models.sharded import META
from hpcsgd.train.tasks import Task


def require_model_fits(model: nn.Module, data: Split, task: Task, name: str, device: torch.device) -> None:
    """Raise `UserError` unless `model`, built by `name`, gives two samples of `data` the scores of `task`; it
    is on `device`.

    What a model of the user's own raises comes through: its traceback tells more. On the meta device such a
    model is left alone: it may look at values.
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
    """Of tokens, users and the like, which a model has places for."""
    return "" if x.is_floating_point() else f" with numbers up to {x.max().item()}"


def _scores(model: nn.Module, x: Tensor) -> object:
    """As in an evaluation, which changes neither the model nor anybody's chance."""
    model.eval()
    with torch.no_grad():
        scores = model(x)
    model.train()
    return scores
