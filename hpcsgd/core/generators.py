"""The random generators that a model may use: those of torch, numpy and Python, and that of a device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from hpcsgd.comm.streams import HOST, generator_state, on_accelerator, set_generator_state


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, numpy and Python, including torch's on devices."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] - torch has no type for a seed
    _seed_the_rest(seed)


def seed_on_host(seed: int) -> None:
    """Seed the generators of the host that `generators_state` saves; do not change those of devices."""
    torch.default_generator.manual_seed(seed)
    _seed_the_rest(seed)


def _seed_the_rest(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generators_state(device: torch.device = HOST) -> dict[str, Any]:
    """Return the states of the generators of the host and of `device`, as tensors and plain values."""
    numbers: Any = np.random.get_state(legacy=False)
    version, key, gauss = random.getstate()
    own = {"device": generator_state(device)} if on_accelerator(device) else {}
    return {
        **own,
        "torch": torch.get_rng_state(),
        "numpy": {
            **numbers,
            "state": {**numbers["state"], "key": torch.as_tensor(numbers["state"]["key"], device="cpu")},
        },
        "python": [version, list(key), gauss],
    }


def load_generators_state(state: dict[str, Any], device: torch.device = HOST) -> None:
    """Set the generators to `state`; the one of `device` does not change if `state` lacks its state."""
    torch.set_rng_state(state["torch"])
    if "device" in state and on_accelerator(device):
        set_generator_state(device, state["device"])
    numbers = state["numpy"]
    np.random.set_state({**numbers, "state": {**numbers["state"], "key": numbers["state"]["key"].numpy()}})
    version, key, gauss = state["python"]
    random.setstate((version, tuple(key), gauss))
