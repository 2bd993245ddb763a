"""Tests of models in training (in 16 bits, channels last, compiled by regions) and in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcsgd.config.schema import TrainingSection
from hpcsgd.engine.precision import precision
from hpcsgd.errors import UserError
from hpcsgd.models import cnn, mlp, resnet18, resnet20
from hpcsgd.models.regions import regions
from hpcsgd.train.model_layout import channels_last, compile_regions, lay_out, narrow

CPU = torch.device("cpu")
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_as_configured_by_default_nothing_changes() -> None:
    net = resnet20()
    before = {name: (p, p.dtype, p.stride()) for name, p in net.named_parameters()}
    lay_out(net, TrainingSection(epochs=1), precision("fp32", CPU))
    assert {name: (p, p.dtype, p.stride()) for name, p in net.named_parameters()} == before
    assert not net._forward_pre_hooks


def test_narrow_but_for_what_has_running_statistics() -> None:
    net = resnet20()
    lay_out(net, TrainingSection(epochs=1), precision("bf16_master", CPU))
    for name, module in net.named_modules():
        wide = isinstance(module, nn.BatchNorm2d)
        for x in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if x.is_floating_point():
                assert x.dtype == (torch.float32 if wide else torch.bfloat16), name
    with torch.autocast("cpu", torch.bfloat16):
        net(IMAGES).float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in net.parameters())


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.Linear, lambda n: nn.Embedding(9, n)])
def test_what_comes_in_is_narrow_where_it_is_no_index(make: Callable[..., nn.Module]) -> None:
    """Floating-point inputs are cast; otherwise a first layer without autocast would get two dtypes."""
    net = nn.LayerNorm(4) if make is nn.LayerNorm else nn.Linear(4, 4) if make is nn.Linear else make(4)
    narrow(net, torch.bfloat16)
    x = torch.tensor([1, 2]) if isinstance(net, nn.Embedding) else torch.ones(2, 4)
    assert net(x).dtype == torch.bfloat16


def test_images_and_weights_have_their_channels_side_by_side() -> None:
    net, seen = resnet20(), []
    net[0].register_forward_pre_hook(lambda _, x: seen.append(x[0].stride()))
    plain = resnet20()
    plain.load_state_dict(net.state_dict())
    channels_last(net)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in net.parameters() if p.dim() == 4)
    torch.testing.assert_close(net.eval()(IMAGES), plain.eval()(IMAGES))
    assert seen == [(3 * 8 * 8, 1, 3 * 8, 3)]


def test_channels_last_of_no_images_is_refused() -> None:
    with pytest.raises(UserError, match=r"\[training\] channels_last: the model has no convolution"):
        channels_last(mlp(4))


def test_the_regions_of_a_residual_network_are_its_blocks() -> None:
    net = resnet20()
    assert list(regions(net)) == [block for block in net if any(block.children())]
    assert len(list(regions(net))) == 9


def test_what_a_list_has_is_a_region_also_with_lists_of_its_own() -> None:
    """A mixture of experts is one region, like a transformer layer, whatever its number of experts."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(2, 2)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Module()
            self.inside.add_module("layers", nn.ModuleList(layers))
            self.head = nn.Linear(2, 2)

    layers = [Mixture(), Mixture()]
    assert list(regions(Net())) == layers


def test_regions_are_the_outermost() -> None:
    layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 4) for _ in range(2)])
    net = nn.ModuleDict({"embedding": nn.Embedding(3, 4), "layers": layers})
    assert list(regions(net)) == list(layers)


class Recorded(torch.autograd.Function):
    """The identity, which calls `told` when the backward pass reaches it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, told: Callable[[], None]) -> Tensor:
        ctx.told = told
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.told()
        return gradients[0], None


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Halves(nn.Module):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.first, self.second = Half(), Half()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Recorded.apply(self.first(x), lambda: self.order.append("between")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it, and means to hide this
def test_gradients_leave_a_region_before_the_next_begins() -> None:
    """Later regions can then hide the communication of gradients. Names and results stay the same."""
    order: list[str] = []
    net = Halves(order)
    names, expected = list(net.state_dict()), net(torch.ones(2, 4)).detach()
    compile_regions(net, backend="aot_eager")
    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    found = net(torch.ones(2, 4))
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    assert list(net.state_dict()) == names
    assert {name.split(".")[0] for name in order[: order.index("between")]} == {"second"}
    assert {name.split(".")[0] for name in order[order.index("between") + 1 :]} == {"first"}
    assert net.first._compiled_call_impl is not None
    assert net._compiled_call_impl is None


def test_a_model_without_parts_is_compiled_as_one() -> None:
    net = mlp(4, [3])
    compile_regions(net, backend="aot_eager")
    assert net._compiled_call_impl is not None
    assert net(torch.ones(2, 4)).shape == (2, 10)


@pytest.mark.parametrize("make", [lambda: cnn([3, 8, 8]), resnet18], ids=["cnn", "resnet18"])
def test_models_for_images_train_narrow_and_channels_last(make: Callable[[], nn.Module]) -> None:
    net = make()
    lay_out(net, TrainingSection(epochs=1, channels_last=True), precision("bf16_master", CPU))
    with torch.autocast("cpu", torch.bfloat16):
        scores = net(IMAGES[:2])
        nn.functional.cross_entropy(scores, torch.tensor([0, 1])).backward()
    assert scores.isfinite().all()
