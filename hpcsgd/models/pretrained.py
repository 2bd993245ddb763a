"""Detection of models of the library `transformers`, or of wrappers around one."""

from __future__ import annotations

from typing import Any

from torch import nn


def pretrained(model: nn.Module) -> Any:
    """Return the outermost module that can write itself for `from_pretrained`, or None."""
    return next((module for module in model.modules() if hasattr(module, "save_pretrained")), None)
