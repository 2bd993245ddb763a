"""The process-wide random numbers of torch, numpy and Python; a user's model may draw from any of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Start all of them anew."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] - torch has no type for a seed
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generators_state() -> dict[str, Any]:
    """Where they have come to, as tensors and plain values."""
    numbers: Any = np.random.get_state(legacy=False)
    version, key, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": {**numbers, "state": {**numbers["state"], "key": torch.as_tensor(numbers["state"]["key"])}},
        "python": [version, list(key), gauss],
    }


def load_generators_state(state: dict[str, Any]) -> None:
    """Go on from there."""
    torch.set_rng_state(state["torch"])
    numbers = state["numpy"]
    np.random.set_state({**numbers, "state": {**numbers["state"], "key": numbers["state"]["key"].numpy()}})
    version, key, gauss = state["python"]
    random.setstate((version, tuple(key), gauss))
