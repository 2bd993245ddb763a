"""A function that finds the model of the library `transformers` in a model."""

from __future__ import annotations

from typing import Any

from torch import nn


def pretrained(model: nn.Module) -> Any:
    """Return the outermost module in `model` that has `save_pretrained`, or None.

    Models of the library `transformers` have it, and wrappers around one may not.
    """
    return next((module for module in model.modules() if hasattr(module, "save_pretrained")), None)
