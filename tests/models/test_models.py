from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcsgd.errors import UserError
from hpcsgd.models import MODELS, build, cifar_resnet, cnn, lstm, mlp, ncf, resnet18, transformer
from hpcsgd.models.resnet import Block
from hpcsgd.models.resnet18 import ProjectionBlock
from hpcsgd.models.resnet50 import Bottleneck

EXAMPLES: dict[str, dict[str, Any]] = {
    "alexnet": {"classes": 7, "dropout": 0.1},
    "cifar_resnet": {"depth": 8, "classes": 7},
    "cnn": {"shape": [3, 32, 32], "classes": 7},
    "edsr": {"scale": 2, "blocks": 2, "width": 4},
    "gpt": {"types": 7, "width": 12, "layers": 2, "heads": 3},
    "lstm": {"types": 7, "embedding": 6, "hidden": 5, "layers": 2},
    "mlp": {"inputs": 3 * 32 * 32, "hidden": [8, 4], "classes": 7},
    "ncf": {"users": 7, "items": 7},
    **{f"resnet{depth}": {"classes": 7} for depth in (10, 18, 20, 32, 44, 50, 56, 101, 110)},
    "transformer": {"types": 7, "width": 12, "layers": 2, "heads": 3, "hidden": 10},
    "vgg11": {"classes": 7, "hidden": [16], "pooled": 1, "dropout": 0.1},
}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_name_has_an_example() -> None:
    assert EXAMPLES.keys() == MODELS.keys()


IDS = {"gpt": [2, 4], "lstm": [2, 4], "ncf": [2, 7, 2], "transformer": [2, 4]}
"""The shape of the input of models that do not take images."""
SIDES = {"alexnet": 63}
"""The side of the smallest images that a model takes, where it is not 32."""


def learn(output: torch.Tensor) -> None:
    """Check the output, images twice as large or scores of 7 classes, and run a backward pass."""
    if output.dim() == 4:
        assert output.shape == (2, 3, 64, 64)
        output.square().mean().backward()
    else:
        assert output.shape[-1] == 7
        output = output.reshape(-1, 7)
        nn.functional.cross_entropy(output, torch.arange(len(output)) % 7).backward()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_parameter_learns(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, EXAMPLES[name])
    side = SIDES.get(name, 32)
    output = model(torch.randint(7, IDS[name]) if name in IDS else torch.randn(2, 3, side, side))
    assert len(output) == 2
    learn(output)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(p.grad.any() for p in model.parameters() if p.grad is not None)


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


def test_resnet18_is_that_of_cifar() -> None:
    model = build("resnet18", {})
    assert parameters(model) == 11_173_962
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convs) == 17
    assert not [m for m in model.modules() if isinstance(m, nn.MaxPool2d)]
    assert model[:-3](torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


def test_a_projection_where_the_size_changes_alone() -> None:
    kinds = [type(b.shortcut) for b in resnet18().modules() if isinstance(b, ProjectionBlock)]
    assert kinds == [nn.Identity] * 2 + [nn.Sequential, nn.Identity] * 3
    block = ProjectionBlock(2, 4, stride=2).eval()
    for conv in (block.conv1, block.conv2):
        nn.init.zeros_(conv.weight)
    x = torch.randn(1, 2, 4, 4)
    projection = next(block.shortcut.children())
    torch.testing.assert_close(block(x), (projection(x) / (1 + 1e-5) ** 0.5).relu())


@pytest.mark.parametrize(
    ("arguments", "count"),
    [({}, 13_987_678), ({"tied": True}, 7_332_078), ({"hidden": 650, "embedding": 650}, 50_065_078)],
)
def test_parameters_of_the_lstm(arguments: dict[str, Any], count: int) -> None:
    """The formula by hand is V·e + Σ over layers of 4h·(inputs + h + 2) + h·V + V."""
    assert parameters(lstm(33_278, **arguments)) == count


def test_the_lstm_is_that_of_its_equations() -> None:
    torch.manual_seed(0)
    model = lstm(5, embedding=3, hidden=2, layers=1, dropout=0.5).eval()
    cell: Any = model.lstm
    x = torch.tensor([[4, 0, 1]])
    h = c = torch.zeros(2)
    for t, token in enumerate(x[0]):
        gates = cell.weight_ih_l0 @ model.embedding.weight[token] + cell.bias_ih_l0
        i, f, g, o = (gates + cell.weight_hh_l0 @ h + cell.bias_hh_l0).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        torch.testing.assert_close(model(x)[0, t], model.scores(h))


def test_dropout_before_between_and_after() -> None:
    model = lstm(5, embedding=4, hidden=6, dropout=0.9).train()
    assert (model.lstm.dropout, model.dropout.p) == (0.9, 0.9)
    x = torch.zeros(1, 3, dtype=torch.int64)
    widths: list[int] = []
    hook = model.dropout.register_forward_hook(lambda _, given, __: widths.append(given[0].shape[-1]))
    assert not torch.equal(model(x), model(x))
    hook.remove()
    assert widths == [4, 6] * 2
    assert torch.equal(model.eval()(x), model(x))
    assert lstm(5, layers=1, dropout=0.9).lstm.dropout == 0


def test_tied_weights() -> None:
    model = lstm(5, embedding=3, hidden=3, tied=True)
    assert model.scores.weight is model.embedding.weight
    assert len(list(model.parameters())) == 2 + 8


def test_neumf_is_that_of_its_equations() -> None:
    torch.manual_seed(0)
    model: Any = ncf(4, 6, factors=3, hidden=(8, 5))
    assert parameters(model) == 4 * (3 + 4) + 6 * (3 + 4) + (8 * 5 + 5) + (3 + 5 + 1)
    u, i = 2, 5
    deep = torch.cat([model.deep_user.weight[u], model.deep_item.weight[i]])
    deep = (model.deep[0].weight @ deep + model.deep[0].bias).relu()
    product = model.product_user.weight[u] * model.product_item.weight[i]
    expected = model.score(torch.cat([product, deep]))[0]
    torch.testing.assert_close(model(torch.tensor([[[0, 1], [u, i]]]))[0, 1], expected)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lstm, {"types": 0}, "lstm: types = 0: must be at least 1"),
        (lstm, {"types": 3, "layers": 0}, "lstm: layers = 0: must be at least 1"),
        (lstm, {"types": 3, "dropout": 1.0}, "lstm: dropout = 1.0: must be at least 0 and less than 1"),
        (lstm, {"types": 3, "embedding": 4, "tied": True}, "need embedding = hidden, not 4 and 200"),
        (transformer, {"types": 0}, "transformer: types = 0: must be at least 1"),
        (transformer, {"types": 3, "dropout": 1}, "dropout = 1: must be at least 0 and less than 1"),
        (
            transformer,
            {"types": 3, "heads": 3},
            "width = 200 and heads = 3: the width is even and a multiple",
        ),
        (transformer, {"types": 3, "width": 9, "heads": 3}, "width = 9 and heads = 3: the width is even"),
        (MODELS["vgg11"], {"hidden": [0]}, r"vgg11: hidden = \[0\], pooled = 7.*must be at least 1"),
        (MODELS["vgg11"], {"dropout": -0.1}, "vgg11: dropout = -0.1: must be at least 0 and less than 1"),
        (MODELS["alexnet"], {"dropout": 1.0}, "alexnet: dropout = 1.0: must be at least 0"),
        (MODELS["edsr"], {"scale": 3}, "edsr: scale = 3: allowed are 2 and 4"),
        (MODELS["edsr"], {"blocks": 0}, "edsr: blocks = 0, width = 256: must be at least 1"),
        (MODELS["resnet101"], {"stem": 5}, r"stem = 5: allowed are 7 \(for ImageNet\) and 3 \(for 32 × 32"),
        (ncf, {"users": 3, "items": 0}, "items = 0, factors = 8: must be at least 1"),
        (ncf, {"users": 3, "items": 3, "hidden": [3]}, r"hidden = \[3\]: sizes of 1 or more, the first"),
        (ncf, {"users": 3, "items": 3, "hidden": []}, r"hidden = \[\]: sizes of 1 or more"),
    ],
)
def test_sizes_that_cannot_be(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**arguments)


def test_resnet50_is_that_of_imagenet() -> None:
    """It has the usual number of parameters, and the sizes of table 1 of the paper."""
    model = build("resnet50", {})
    assert parameters(model) == 25_557_032
    sizes: list[tuple[int, ...]] = []
    for layer in model.children():
        if isinstance(layer, Bottleneck):
            layer.register_forward_hook(lambda _, __, y: sizes.append(tuple(y.shape[1:])))
    model.eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    assert sizes == [(256, 16, 16)] * 3 + [(512, 8, 8)] * 4 + [(1024, 4, 4)] * 6 + [(2048, 2, 2)] * 3


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [
        ("vgg11", {}, 132_863_336),
        ("vgg11", {"classes": 10, "hidden": [], "pooled": 1}, 9_225_610),
        ("alexnet", {}, 61_100_840),
        ("resnet10", {}, 4_903_242),
        ("resnet101", {}, 44_549_160),
        ("resnet101", {"classes": 10, "stem": 3}, 42_512_970),
        ("edsr", {"scale": 2}, 40_729_603),
        ("edsr", {"scale": 4}, 43_089_923),
        ("edsr", {"scale": 2, "blocks": 16, "width": 64}, 1_369_859),
        ("edsr", {"scale": 4, "blocks": 16, "width": 64}, 1_517_571),
    ],
)
def test_as_many_parameters_as_everybodys(name: str, arguments: dict[str, Any], count: int) -> None:
    """The counts are those published. The models have no values, which would take a gigabyte."""
    with torch.device("meta"):
        assert parameters(build(name, arguments)) == count


def test_layers_of_the_new_resnets() -> None:
    """A network has as many layers as its name says, not counting shortcuts."""
    for name, depth in (("resnet10", 10), ("resnet101", 101)):
        with torch.device("meta"):
            layers = build(name, {}).named_modules()
        counted = [key for key, m in layers if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in key]
        assert len(counted) == depth


@pytest.mark.slow
def test_resnet10_and_a_small_stem_keep_the_size_of_small_images() -> None:
    x = torch.zeros(1, 3, 32, 32)
    assert build("resnet10", {})[:-3](x).shape == (1, 512, 4, 4)
    assert build("resnet101", {"stem": 3})[:-3].eval()(x).shape == (1, 2048, 4, 4)
    assert build("resnet101", {})[:-3].eval()(x).shape == (1, 2048, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg11", "alexnet"])
def test_sizes_of_features(name: str) -> None:
    """The sizes are those before average pooling, which does not change them for images of 224 x 224."""
    model = build(name, {"classes": 3})
    side = next(i for i, m in enumerate(model.children()) if isinstance(m, nn.AdaptiveAvgPool2d))
    with torch.no_grad():
        found = model[:side](torch.zeros(1, 3, 224, 224))
    assert found.shape == {"vgg11": (1, 512, 7, 7), "alexnet": (1, 256, 6, 6)}[name]


def test_the_transformer_is_that_of_torch() -> None:
    """It equals torch's encoder with a causal mask and the same weights.

    The positions follow the formula of section 3.5.
    """
    torch.manual_seed(0)
    model: Any = transformer(7, width=6, layers=2, heads=3, hidden=5, dropout=0.0)
    layers = [nn.TransformerEncoderLayer(6, 3, 5, 0.0, batch_first=True) for _ in range(2)]
    theirs: Any
    for mine, theirs in zip(model.layers, layers, strict=True):
        state = {
            "self_attn.in_proj_weight": mine.attention.qkv.weight,
            "self_attn.in_proj_bias": mine.attention.qkv.bias,
            "self_attn.out_proj.weight": mine.attention.out.weight,
            "self_attn.out_proj.bias": mine.attention.out.bias,
        }
        for name, part in (
            ("linear1", mine.first),
            ("linear2", mine.second),
            ("norm1", mine.norm1),
            ("norm2", mine.norm2),
        ):
            state |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
        theirs.load_state_dict(state)
    x = torch.randint(7, (2, 4))
    places = torch.tensor([[t / 10_000 ** (2 * (i // 2) / 6) for i in range(6)] for t in range(4)])
    places[:, 0::2], places[:, 1::2] = places[:, 0::2].sin(), places[:, 1::2].cos()
    expected = model.embedding.weight[x] * 6**0.5 + places
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    for theirs in layers:
        expected = theirs(expected, src_mask=mask)
    torch.testing.assert_close(model(x), model.scores(expected))


def test_the_transformer_of_selsync() -> None:
    """Section IV-A has 2 layers of width 200 with 2 heads. The parameters are counted by hand."""
    V, d = 1000, 200
    layer = (3 * d * d + 3 * d) + (d * d + d) + 2 * (d * d + d) + 2 * 2 * d
    assert parameters(transformer(V)) == V * d + 2 * layer + d * V + V
    model = transformer(V, tied=True)
    assert model.scores.weight is model.embedding.weight
    x = torch.zeros(1, 3, dtype=torch.int64)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_edsr_is_that_of_its_figure() -> None:
    """The reference uses functions alone.

    Four channels of the small image become four pixels of one channel of the large image.
    """
    torch.manual_seed(0)
    model: Any = MODELS["edsr"](scale=4, blocks=2, width=6, residual=0.3)
    x = torch.rand(2, 3, 5, 4)

    def conv(layer: Any, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(y, layer.weight, layer.bias, padding=1)

    head = conv(model.head, x - model.mean)
    found = head
    for block in model.blocks:
        found = found + 0.3 * conv(block.conv2, conv(block.conv1, found).relu())
    found = head + conv(model.after, found)
    for doubling in model.larger:
        four = conv(doubling.conv, found)
        b, _, h, w = four.shape
        found = four.view(b, 6, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, 6, 2 * h, 2 * w)
    torch.testing.assert_close(model(x), conv(model.tail, found) + model.mean)
    assert model(x).shape == (2, 3, 20, 16)
    assert "mean" not in model.state_dict()
