"""Tests of the FLOPs of models against counts by hand; counting leaves no trace."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcsgd.models import build, gpt, mlp, resnet20
from hpcsgd.train.model_flops import flops_of_sample


@pytest.mark.parametrize("T", [5, 16])
@pytest.mark.parametrize("tied", [True, False])
def test_of_a_gpt(T: int, tied: bool) -> None:
    """A GPT has 6 FLOPs per weight of a matrix and token, and 12·L·d·T for attention."""
    model = gpt(50, width=12, layers=3, heads=2, tied=tied, dropout=0.1)
    matrices = 3 * 12 * 12**2 + 50 * 12
    found = flops_of_sample(model, torch.zeros(2, T, dtype=torch.int64))
    assert found == T * (6 * matrices + 12 * 3 * 12 * T)


@pytest.mark.slow
def test_of_a_library() -> None:
    sizes = {"vocab_size": 14, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    model = build("transformers:AutoModelForCausalLM", {"model_type": "gpt2", **sizes})
    found = flops_of_sample(model, torch.zeros(2, 7, dtype=torch.int64))
    assert found == 7 * (6 * (2 * 12 * 8**2 + 14 * 8) + 12 * 2 * 8 * 7)


def test_of_images() -> None:
    """A weight has 2 FLOPs forward and 4 backward, or 2 in the first layer, whose input needs no gradient."""
    model, macs = resnet20(), list[int]()

    def count(layer: Any, _: Any, out: Tensor) -> None:
        macs.append(out[0].numel() * layer.weight[0].numel())

    hooks = [
        layer.register_forward_hook(count)
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    ]
    x = torch.zeros(2, 3, 32, 32)
    model(x)
    for hook in hooks:
        hook.remove()
    assert flops_of_sample(model, x) == 6 * sum(macs) - 2 * macs[0]
    assert flops_of_sample(mlp(6, hidden=(5,), classes=3), torch.zeros(2, 6)) == 6 * (30 + 15) - 2 * 30


def test_it_leaves_no_trace() -> None:
    model = nn.Sequential(resnet20(), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    chance = torch.get_rng_state()
    assert flops_of_sample(model, torch.randn(2, 3, 8, 8, generator=torch.Generator()))
    assert torch.equal(chance, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Choosy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_a_model_that_asks_for_values(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert flops_of_sample(Choosy(3, 3), torch.ones(2, 3)) is None
    (message,) = caplog.messages
    assert message.startswith("FLOPs of the model are not known: it needs values (")
