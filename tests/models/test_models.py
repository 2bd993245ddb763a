from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcsgd.errors import UserError
from hpcsgd.models import MODELS, build, cifar_resnet, cnn, mlp
from hpcsgd.models.resnet import Block

EXAMPLES: dict[str, dict[str, Any]] = {
    "cifar_resnet": {"depth": 8, "classes": 7},
    "cnn": {"shape": [3, 32, 32], "classes": 7},
    "mlp": {"inputs": 3 * 32 * 32, "hidden": [8, 4], "classes": 7},
    **{f"resnet{depth}": {"classes": 7} for depth in (20, 32, 44, 56, 110)},
}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_name_has_an_example() -> None:
    assert EXAMPLES.keys() == MODELS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_parameter_learns(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, EXAMPLES[name])
    output = model(torch.randn(2, 3, 32, 32))
    assert output.shape == (2, 7)
    nn.functional.cross_entropy(output, torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("depth", "count"), [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)]
)
def test_parameters_of_the_resnets(depth: int, count: int) -> None:
    model = build(f"resnet{depth}", {})
    assert parameters(model) == count
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


@pytest.mark.parametrize("depth", [2, 18, 21, -4, 0])
def test_other_depths(depth: int) -> None:
    with pytest.raises(UserError, match=f"depth {depth}: must be 6n \\+ 2"):
        cifar_resnet(depth)


def test_the_shortcut_takes_every_second_pixel_and_adds_zero_channels() -> None:
    block = Block(2, 4, stride=2).eval()
    for conv in (block.conv1, block.conv2):
        nn.init.zeros_(conv.weight)
    x = torch.rand(1, 2, 4, 4)
    expected = torch.zeros(1, 4, 2, 2)
    expected[:, 1:3] = x[:, :, ::2, ::2]
    assert torch.equal(block(x), expected)


def test_resnets_start_as_kaiming_says() -> None:
    torch.manual_seed(0)
    convs = [m for m in cifar_resnet(20).modules() if isinstance(m, nn.Conv2d)]
    for conv in convs:
        assert conv.weight.std().item() == pytest.approx((2 / (9 * conv.in_channels)) ** 0.5, rel=0.15)


def test_small_models() -> None:
    assert parameters(mlp(64, hidden=(32,), classes=10)) == 64 * 32 + 32 + 32 * 10 + 10
    assert mlp(6, hidden=(), classes=3)(torch.randn(5, 1, 2, 3)).shape == (5, 3)
    assert parameters(cnn((1, 8, 8), widths=(4,))) == 9 * 4 + 4 + 4 * 16 * 10 + 10
    with pytest.raises(UserError, match="need at least 16 x 16"):
        cnn((1, 8, 8), widths=(4, 4, 4, 4))
    with pytest.raises(UserError, match="channels, height, width"):
        cnn([28, 28])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet_20", {}, "no 'resnet_20'; did you mean 'resnet20'"),
        (
            "resnet20",
            {"class": 10},
            r"\[model.arguments\]: resnet20 has no argument 'class'; did you",
        ),
        ("mlp", {}, r"\[model.arguments\]: mlp needs 'inputs'; given: none"),
        ("builtins:dict", {"a": 1}, "'builtins:dict' returned dict, expected Module"),
    ],
)
def test_what_cannot_be_built(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, arguments)


def test_the_users_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\ndef net(width):\n    return nn.Linear(width, 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert parameters(build("own_network:net", {"width": 3})) == 4
