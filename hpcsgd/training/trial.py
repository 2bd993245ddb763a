"""Does the model fit the data? Asked before anything is written, when the answer is still one clear line."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcsgd.data import Store
from hpcsgd.errors import UserError
from hpcsgd.models import MODELS


def require_fitting(model: nn.Module, data: Store, name: str) -> None:
    """Raise `UserError` unless `model`, built by `name`, gives two samples of `data` a score for every class.

    What a model of the user's own raises comes through: its traceback tells more.
    """
    x, _ = data.collate(data.__getitems__([0, len(data) - 1]))
    try:
        scores = _scores(model, x)
    except RuntimeError as error:
        if name not in MODELS:
            raise
        raise UserError(
            f"[model]: {name} does not take samples of shape {list(data.shape)}: {error}"
        ) from error
    classes = len(data.classes)
    if not isinstance(scores, Tensor):
        raise UserError(f"[model]: {name} gives a {type(scores).__name__}, expected a tensor of scores")
    if scores.dim() != 2 or len(scores) != len(x) or scores.shape[1] < classes:
        raise UserError(
            f"[model]: {name} gives scores of shape {list(scores.shape)} for {len(x)} samples, but "
            f"{data.path} has {classes} classes: expected {[len(x), classes]}"
        )


def _scores(model: nn.Module, x: Tensor) -> object:
    """As in an evaluation, which changes neither the model nor anybody's chance."""
    model.eval()
    with torch.no_grad():
        scores = model(x)
    model.train()
    return scores
