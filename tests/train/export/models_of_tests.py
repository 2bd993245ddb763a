"""Models that the job files of these tests name."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def convolutions() -> nn.Module:
    """Return a model with running statistics, a frozen weight and weights in channels-last layout."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 10)
    )
    net[2].bias.requires_grad_(False)
    return net


def seeded(model: nn.Module, seed: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return model


class OfTransformers(nn.Module):
    """A model of the library inside another module, which returns only the scores. Its weights are tied."""

    def __init__(self, types: int, width: int) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, GPT2Config

        config = GPT2Config(vocab_size=types, n_embd=width, n_layer=1, n_head=2, n_positions=16)
        config.bos_token_id = config.eos_token_id = None
        config.use_cache = False
        self.inner = AutoModelForCausalLM.from_config(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).logits


def of_transformers(types: int, width: int = 8) -> nn.Module:
    return OfTransformers(types, width)
