from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcsgd.errors import UserError
from hpcsgd.models import build, gpt
from hpcsgd.models.gpt import rotation, turned

Array = NDArray[np.float64]


def filled(**arguments: Any) -> nn.Module:
    """Return a model whose weights are large enough for every part to matter."""
    model = gpt(11, **arguments)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / (p.shape[-1] ** 0.5 if p.dim() == 2 else 1))
    return model.eval()


def ids(b: int, T: int) -> Tensor:
    return torch.randint(11, (b, T), generator=torch.Generator().manual_seed(4))


def rms(x: Array, gain: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain


def attention(x: Array, qkv: Array, out: Array, heads: int) -> Array:
    """Return the attention of one text [T, width], computed by loops over heads and pairs of positions.

    The rotary embedding multiplies complex numbers by exp(i·t·θ).
    """
    T, width = x.shape
    d = width // heads
    found = np.zeros((T, width))
    q, k, v = ((x @ part.T).reshape(T, heads, d) for part in np.split(qkv, 3))
    theta = np.array([10_000 ** (-2 * i / d) for i in range(d // 2)])
    for h in range(heads):
        for t in range(T):
            scores = []
            for s in range(t + 1):
                a = (q[t, h, : d // 2] + 1j * q[t, h, d // 2 :]) * np.exp(1j * t * theta)
                b = (k[s, h, : d // 2] + 1j * k[s, h, d // 2 :]) * np.exp(1j * s * theta)
                scores.append((a * b.conj()).real.sum() / math.sqrt(d))
            weights = np.exp(np.array(scores) - max(scores))
            found[t, h * d : (h + 1) * d] = weights @ v[: t + 1, h] / weights.sum()
    return found @ out.T


def reference(model: nn.Module, x: Tensor, layers: int, heads: int) -> Array:
    w = {name: p.detach().double().numpy() for name, p in model.state_dict().items()}
    erf = np.vectorize(math.erf)
    texts = []
    for text in x.tolist():
        found = w["embedding.weight"][text]
        for i in range(layers):
            at = f"blocks.{i}."
            normed = rms(found, w[at + "before_attention.weight"])
            found = found + attention(
                normed, w[at + "attention.qkv.weight"], w[at + "attention.out.weight"], heads
            )
            h = rms(found, w[at + "before_perceptron.weight"]) @ w[at + "perceptron.first.weight"].T
            found = found + h * (1 + erf(h / math.sqrt(2))) / 2 @ w[at + "perceptron.out.weight"].T
        texts.append(rms(found, w["norm.weight"]) @ w["scores.weight"].T)
    return np.stack(texts)


@pytest.mark.parametrize(("width", "layers", "heads"), [(12, 2, 3), (8, 1, 1), (20, 3, 5)])
@pytest.mark.parametrize("tied", [True, False])
def test_against_numpy(width: int, layers: int, heads: int, tied: bool) -> None:
    model = filled(width=width, layers=layers, heads=heads, tied=tied)
    x = ids(2, 9)
    with torch.no_grad():
        found = model(x).double().numpy()
    assert found == pytest.approx(reference(model, x, layers, heads), rel=1e-3, abs=1e-4)


def test_nothing_is_known_of_what_comes_later() -> None:
    model, x = filled(width=12, heads=3), ids(1, 10)
    with torch.no_grad():
        before = model(x)
        for t in range(10):
            other = x.clone()
            other[0, t] = (other[0, t] + 1) % 11
            changed = (model(other) != before).any(-1)[0]
            assert not changed[:t].any()
            assert changed[t:].all(), "but of all that came before"


def test_only_distances_count() -> None:
    """Attention scores depend on the distance of two tokens, not on their positions. No length is fixed."""
    turn = rotation(40, 8, torch.device("cpu"))
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    scores = turned(q.expand(40, 8), turn) @ turned(k.expand(40, 8), turn).T
    for distance in (0, 1, 7):
        along = scores.diagonal(-distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-4)
    assert turned(q.bfloat16().expand(40, 8), turn).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("preset", "tied", "count"),
    [
        ("small", True, 50_257 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768),
        ("medium", True, 50_257 * 1024 + 24 * (12 * 1024**2 + 2 * 1024) + 1024),
        ("small", False, 2 * 50_257 * 768 + 12 * (12 * 768**2 + 2 * 768) + 768),
    ],
)
def test_presets(preset: str, tied: bool, count: int) -> None:
    with torch.device("meta"):
        model = build("gpt", {"types": 50_257, "preset": preset, "tied": tied})
    assert sum(p.numel() for p in model.parameters()) == count
    assert count == pytest.approx({"small": 124e6, "medium": 354e6}[preset] + (not tied) * 38.6e6, rel=0.01)


def test_sizes_of_ones_own_go_before_those_of_a_preset() -> None:
    with torch.device("meta"):
        model = gpt(5, "small", layers=2)
    assert sum(p.numel() for p in model.parameters()) == 5 * 768 + 2 * (12 * 768**2 + 2 * 768) + 768


def test_it_starts_small_and_knows_nothing() -> None:
    torch.manual_seed(0)
    model = gpt(300, width=64, layers=6, heads=4)
    x = torch.randint(300, (4, 50))
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), torch.randint(300, (200,)))
    assert loss.item() == pytest.approx(math.log(300), rel=0.02)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            spread = 0.02 / math.sqrt(2 * 6) if name.endswith("out.weight") else 0.02
            assert p.std().item() == pytest.approx(spread, rel=0.1), name


def test_dropout_is_for_training() -> None:
    torch.manual_seed(0)
    model, x = gpt(11, width=12, heads=3, dropout=0.5), ids(1, 5)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "smaller"}, "gpt: no preset 'smaller'; did you mean 'small'"),
        ({"heads": 3}, "gpt: width = 128 and heads = 3: each head needs an even part"),
        ({"layers": 0}, "gpt: layers = 0: must be at least 1"),
        ({"dropout": 1.0}, "gpt: dropout = 1.0: must be at least 0 and less than 1"),
    ],
)
def test_sizes_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gpt(11, **arguments)
