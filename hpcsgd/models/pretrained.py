"""Where a model is one of the library `transformers`, or goes around one."""

from __future__ import annotations

from typing import Any

from torch import nn


def pretrained(model: nn.Module) -> Any:
    """The outermost module that can write itself for `from_pretrained`; None where there is none."""
    return next((module for module in model.modules() if hasattr(module, "save_pretrained")), None)
