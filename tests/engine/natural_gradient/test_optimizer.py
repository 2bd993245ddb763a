"""Tests of hooks, state and refusals, on one rank and with plain optimizers."""

from __future__ import annotations

import copy
import functools
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from fisher_matrices import dense
from hpcsgd import NaturalGradient, UserError
from hpcsgd.engine.natural_gradient.fisher import Fisher

ALPHA = 4.0


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(net: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    net.to(dtype)
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(randn(*p.shape, seed=100 + i) / 2)
    return net


def mlp() -> Any:
    return seeded(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))


def cnn() -> Any:
    return seeded(nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 2)))


X_OF: dict[Callable[[], Any], tuple[int, ...]] = {mlp: (8, 5), cnn: (4, 2, 6, 6)}


def wrapped(net: Any, **options: Any) -> NaturalGradient:
    options = {"rank": 2, "every": 1, **options}
    return NaturalGradient(optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net, **options)


def backward(net: Any, t: int, shape: tuple[int, ...] = (8, 5)) -> None:
    x = randn(*shape, seed=t) / torch.arange(1, shape[-1] + 1)
    net(x).square().mean().backward()


def train(net: Any, optimizer: optim.Optimizer, steps: range, shape: tuple[int, ...] = (8, 5)) -> None:
    for t in steps:
        optimizer.zero_grad()
        backward(net, t, shape)
        optimizer.step()


def gradients(net: Any, t: int, shape: tuple[int, ...] = (8, 5)) -> dict[str, Tensor]:
    """Return the gradients without preconditioning, from a copy, whose hooks do nothing."""
    plain = copy.deepcopy(net)
    plain.zero_grad()
    backward(plain, t, shape)
    return {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}


def smoothed(F: Fisher | None) -> Tensor:
    assert F is not None
    D = F.R.shape[1]
    return dense(F) + ALPHA * F.trace / D * torch.eye(D, dtype=torch.float64)


def scaled(found: Tensor, like: Tensor) -> Tensor:
    return (found * like.norm() / found.norm()).view_as(like)


def vector(net: Any) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("make", X_OF)
def test_gradients_are_multiplied_by_both_inverses(make: Callable[[], Any]) -> None:
    net, shape = make(), X_OF[make]
    optimizer = wrapped(net)
    train(net, optimizer, range(3), shape)
    plain = gradients(net, 3, shape)
    optimizer.zero_grad()
    backward(net, 3, shape)
    for name, i in (("0", 0), ("2", 1)):
        layer = optimizer.layers[i]
        left, right = smoothed(layer.outputs.F).inverse(), smoothed(layer.inputs.F).inverse()
        G, b = plain[f"{name}.weight"], plain[f"{name}.bias"]
        weight, bias = net.get_submodule(name).weight.grad, net.get_submodule(name).bias.grad
        torch.testing.assert_close(weight, scaled(left @ G.flatten(1) @ right, G), rtol=0, atol=1e-12)
        torch.testing.assert_close(bias, scaled(left @ b, b), rtol=0, atol=1e-12)
        assert not torch.allclose(weight, G, rtol=0.1, atol=0)


@pytest.mark.parametrize("make", X_OF)
def test_estimates_are_of_what_the_layers_saw(make: Callable[[], Any]) -> None:
    """The estimates are of each layer's inputs and derivatives, as autograd computes them.

    The first minibatch leaves the gradients unchanged.
    """
    net, shape = make(), X_OF[make]
    x = randn(*shape, seed=0) / torch.arange(1, shape[-1] + 1)
    z1 = copy.deepcopy(net[0])(x)
    a = z1.tanh()
    z2 = copy.deepcopy(net[2])(a)
    dz1, dz2 = torch.autograd.grad(z2.square().mean(), (z1, z2))
    if make is cnn:
        x = nn.functional.unfold(x, 3, stride=2, padding=1).mT.reshape(-1, 18)
        a = nn.functional.unfold(a, 2).mT.reshape(-1, 16)
        dz1, dz2 = (dz.movedim(1, -1).flatten(0, 2) for dz in (dz1, dz2))
    optimizer = wrapped(net)
    plain = gradients(net, 0, shape)
    backward(net, 0, shape)
    assert all(torch.equal(p.grad, plain[name]) for name, p in net.named_parameters())
    optimizer.step()
    first, second = optimizer.layers
    for side, rows in ((first.inputs, x), (first.outputs, dz1), (second.inputs, a), (second.outputs, dz2)):
        expected = Fisher.of(rows.detach(), 2)
        assert expected is not None
        assert side.F is not None
        torch.testing.assert_close(dense(side.F), dense(expected), rtol=1e-9, atol=0)


def test_one_update_forgets_by_the_number_of_rows() -> None:
    net = seeded(nn.Sequential(nn.Linear(5, 3)))
    optimizer = wrapped(net, history=40.0)
    train(net, optimizer, range(1))
    F = optimizer.layers[0].inputs.F
    assert F is not None
    train(net, optimizer, range(1, 2))
    x = randn(8, 5, seed=1) / torch.arange(1, 6)
    expected = F.updated(x, 1 - torch.tensor(-8 / 40, dtype=torch.float64).exp().item())
    found = optimizer.layers[0].inputs.F
    assert found is not None
    torch.testing.assert_close(dense(found), dense(expected), rtol=0, atol=1e-14)


def test_layers_take_turns_after_the_first_steps() -> None:
    net = mlp()
    optimizer = wrapped(net, every=4)
    changes = []
    for t in range(18):
        before = [layer.inputs.F for layer in optimizer.layers]
        train(net, optimizer, range(t, t + 1))
        after = [layer.inputs.F for layer in optimizer.layers]
        changes.append([a is not b for a, b in zip(before, after, strict=True)])
    assert changes[:10] == [[True, True]] * 10
    assert changes[10:] == [[False, False], [False, True], [True, False], [False, False]] * 2


def test_what_is_left_alone() -> None:
    parts = [nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1), nn.ConvTranspose2d(2, 2, 2)]
    net = seeded(nn.Sequential(*parts, nn.Flatten(), nn.Linear(50, 4), nn.Linear(4, 2)))
    net[6].weight.requires_grad_(False)
    optimizer = wrapped(net)
    assert [layer.name for layer in optimizer.layers] == ["2", "5"]
    train(net, optimizer, range(2), (4, 2, 6, 6))
    plain = gradients(net, 2, (4, 2, 6, 6))
    optimizer.zero_grad()
    backward(net, 2, (4, 2, 6, 6))
    same = {name for name, p in net.named_parameters() if name in plain and torch.equal(p.grad, plain[name])}
    assert set(plain) - same == {"2.weight", "2.bias", "5.weight", "5.bias"}


def test_only_what_the_optimizer_trains() -> None:
    net = mlp()
    optimizer = NaturalGradient(optim.SGD([net[2].weight], lr=0.1), net, rank=2)
    assert [layer.name for layer in optimizer.layers] == ["2"]
    train(net, optimizer, range(2))
    net.zero_grad()
    plain = gradients(net, 2)
    backward(net, 2)
    changed = {name for name, p in net.named_parameters() if not torch.equal(p.grad, plain[name])}
    assert changed == {"2.weight"}


def test_forward_passes_alone_do_not_count() -> None:
    """Evaluation and forward passes whose graph is dropped do not change the training."""
    nets = [mlp(), mlp()]
    for noisy, net in enumerate(nets):
        optimizer = wrapped(net)
        for t in range(4):
            optimizer.zero_grad()
            backward(net, t)
            if noisy:
                with torch.no_grad():
                    net(randn(100, 5, seed=50 + t))
                net(randn(100, 5, seed=60 + t))
            optimizer.step()
    assert torch.equal(vector(nets[0]), vector(nets[1]))


def test_a_layer_used_twice_and_a_tied_weight_are_one() -> None:
    """Each use adds rows to one estimate; the gradient is the sum, preconditioned once."""

    class Twice(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.second = nn.Linear(5, 5) if tied else self.first
            self.second.weight, self.second.bias = self.first.weight, self.first.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    found = []
    for tied in (False, True):
        net = seeded(Twice(tied))
        optimizer = wrapped(net)
        assert len(optimizer.layers) == 1
        train(net, optimizer, range(3))
        plain = gradients(net, 3)["first.weight"]
        optimizer.zero_grad()
        backward(net, 3)
        assert net.first.weight.grad.norm() == pytest.approx(plain.norm().item())
        found.append(vector(net))
    assert torch.equal(*found)


def test_several_backward_passes_before_a_step() -> None:
    """Each gradient is preconditioned by the estimates of the last step.

    The next estimates get the rows of all passes.
    """
    net = seeded(nn.Sequential(nn.Linear(5, 3)))
    optimizer = wrapped(net, history=100.0)
    train(net, optimizer, range(2))
    layer = optimizer.layers[0]
    left, right = smoothed(layer.outputs.F).inverse(), smoothed(layer.inputs.F).inverse()
    parts = [gradients(net, t)["0.weight"] for t in (2, 3)]
    expected = sum(scaled(left @ G @ right, G) for G in parts)
    before = layer.inputs.F
    assert before is not None
    optimizer.zero_grad()
    backward(net, 2)
    backward(net, 3)
    torch.testing.assert_close(net[0].weight.grad, expected, rtol=0, atol=1e-12)
    optimizer.step()
    x = torch.cat([randn(8, 5, seed=t) / torch.arange(1, 6) for t in (2, 3)])
    eta = 1 - torch.tensor(-16 / 100, dtype=torch.float64).exp().item()
    assert layer.inputs.F is not None
    torch.testing.assert_close(dense(layer.inputs.F), dense(before.updated(x, eta)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_minibatches_that_are_not_finite_are_left_out(value: float, caplog: pytest.LogCaptureFixture) -> None:
    net = mlp()
    optimizer = wrapped(net)
    train(net, optimizer, range(3))
    before, weights = [layer.inputs.F for layer in optimizer.layers], vector(net)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.full((8, 5), value, dtype=torch.float64)).square().mean().backward()
            assert not net[0].weight.grad.isfinite().all()  # a check for overflow still finds it
            optimizer.zero_grad()
            optimizer.step()
    assert optimizer.layers[0].inputs.F is before[0]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told))
    assert "natural gradient: inputs of 0 are not finite: left out" in told
    nn.utils.vector_to_parameters(weights, net.parameters())
    train(net, optimizer, range(3, 6))
    assert vector(net).isfinite().all()


def test_a_failed_estimate_starts_afresh(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    net = mlp()
    optimizer = wrapped(net)
    train(net, optimizer, range(2))

    def fails(*_: Any) -> Any:
        raise torch.linalg.LinAlgError("no")  # pyright: ignore[reportPrivateImportUsage]

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch.linalg, "eigh", fails)
        train(net, optimizer, range(2, 4))
    assert [layer.inputs.F for layer in optimizer.layers] == [None, None]
    assert "derivatives of 2 have no estimate: starting afresh (no)" in caplog.text
    plain = gradients(net, 4)
    optimizer.zero_grad()
    backward(net, 4)
    assert torch.equal(net[0].weight.grad, plain["0.weight"])
    optimizer.step()
    assert optimizer.layers[0].inputs.F is not None


def test_no_more_rows_are_kept_than_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsgd.engine.natural_gradient.layer.ROWS", 10)
    net = mlp()
    optimizer = wrapped(net)
    for _ in range(2):
        for t in range(5):
            backward(net, t)
        assert [sum(map(len, layer._X)) for layer in optimizer.layers] == [16, 16]
        optimizer.step()
        assert [layer._X for layer in optimizer.layers] == [[], []]


def test_zero_gradients_and_a_batch_of_one() -> None:
    net = mlp()
    optimizer = wrapped(net)
    for t in range(6):
        optimizer.zero_grad()
        (net(randn(1, 5, seed=t)) * (0.0 if t in (0, 3) else 1.0)).square().mean().backward()
        optimizer.step()
        assert vector(net).isfinite().all()


def test_an_empty_batch_and_a_layer_without_a_gradient() -> None:
    net = mlp()
    optimizer = wrapped(net)
    train(net, optimizer, range(1))
    optimizer.zero_grad()
    net(torch.zeros(0, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net[0](randn(4, 5)).sum().backward()
    optimizer.step()
    assert vector(net).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_precision(dtype: torch.dtype) -> None:
    net = seeded(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), dtype)
    optimizer = wrapped(net)
    for t in range(3):
        optimizer.zero_grad()
        net(randn(8, 5, seed=t).to(dtype)).square().mean().backward()
        assert net[0].weight.grad.dtype == dtype
        optimizer.step()
    F = optimizer.layers[0].inputs.F
    assert F is not None
    assert F.R.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert vector(net).isfinite().all()


def test_autocast() -> None:
    net = seeded(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), torch.float32)
    optimizer = wrapped(net)
    for t in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(randn(8, 5, seed=t).float()).square().mean().backward()
        optimizer.step()
    assert vector(net).isfinite().all()


def test_second_derivatives_pass_untouched() -> None:
    net = mlp()
    optimizer = wrapped(net)
    train(net, optimizer, range(2))
    x = randn(4, 5).requires_grad_()
    plain = copy.deepcopy(net)
    (theirs,) = torch.autograd.grad(plain(x).square().sum(), plain[0].weight, create_graph=True)
    (ours,) = torch.autograd.grad(net(x).square().sum(), net[0].weight, create_graph=True)
    assert torch.equal(ours, theirs)
    assert ours.requires_grad


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # caused by dynamo
def test_a_compiled_model() -> None:
    """A compiled model and one with activation checkpointing train as a plain model does."""
    found = []
    for around in (
        lambda net: net,
        lambda net: torch.compile(net, backend="aot_eager"),
        lambda net: functools.partial(checkpoint, net, use_reentrant=False),
    ):
        net = mlp()
        optimizer, called = wrapped(net), around(net)
        for t in range(3):
            optimizer.zero_grad()
            called(randn(8, 5, seed=t)).square().mean().backward()
            optimizer.step()
        found.append(vector(net))
    torch.testing.assert_close(found[1:], found[:1] * 2, rtol=0, atol=1e-12)


def test_nothing_seen_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    net = mlp()
    optimizer = wrapped(net)
    for _ in range(12):
        nn.functional.linear(randn(8, 5), net[0].weight).sum().backward()
        optimizer.step()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["natural gradient: no layer saw a minibatch: gradients stay as they are"]


def test_a_copied_or_saved_model_is_left_alone() -> None:
    net = mlp()
    optimizer = wrapped(net)
    train(net, optimizer, range(2))
    optimizer.zero_grad()
    before = optimizer.layers[0].inputs.F
    saved = io.BytesIO()
    torch.save(net, saved)
    saved.seek(0)
    for other in (copy.deepcopy(net), torch.load(saved, weights_only=False)):
        other.zero_grad()
        backward(other, 2)
        plain = gradients(net, 2)
        assert all(torch.equal(p.grad, plain[name]) for name, p in other.named_parameters())
        optimizer.step()
        assert optimizer.layers[0].inputs.F is before


@pytest.mark.parametrize("after", [0, 2])
def test_a_model_converted_after_the_wrapping(after: int) -> None:
    net = seeded(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), torch.float32)
    optimizer = wrapped(net)
    for t in range(5):
        if t == after:
            net.double()
            optimizer.state.clear()
        optimizer.zero_grad()
        net(randn(8, 5, seed=t).to(net[0].weight.dtype)).square().mean().backward()
        assert net[0].weight.grad.dtype == net[0].weight.dtype
        optimizer.step()
    assert vector(net).isfinite().all()


def test_state_goes_on_to_the_same_bits() -> None:
    net = mlp()
    optimizer = wrapped(net, every=3)
    train(net, optimizer, range(13))
    weights = {k: v.clone() for k, v in net.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, range(13, 20))
    again = mlp()
    again.load_state_dict(weights)
    resumed = wrapped(again, every=3)
    resumed.load_state_dict(saved)
    train(again, resumed, range(13, 20))
    assert torch.equal(vector(net), vector(again))


def test_state_of_the_plain_optimizer_or_of_another_rank_starts_afresh(caplog: Any) -> None:
    net = mlp()
    optimizer = wrapped(net)
    train(net, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.remove()
    for state, options in (({**saved, "natural_gradient": None}, {}), (saved, {"rank": 3})):
        other = wrapped(net, **options)
        with caplog.at_level(logging.INFO, "hpcsgd"):
            caplog.clear()
            other.load_state_dict(state)
        assert [record.getMessage() for record in caplog.records] == [
            "natural gradient: no saved estimates of this rank for 2 of 2 layers: they start afresh"
        ]
        assert all(layer.inputs.F is None for layer in other.layers)
        assert other.state_dict()["state"].keys() == saved["state"].keys()
        train(net, other, range(2))
        other.remove()


def test_a_scheduler_and_hooks_and_a_closure() -> None:
    net = mlp()
    optimizer = wrapped(net)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = net(randn(8, 5)).square().mean()
        value.backward()
        return value

    before = vector(net)
    assert optimizer.step(closure) > 0
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.025
    assert seen == [1]
    assert not torch.equal(vector(net), before)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.0125
    assert optimizer.state is optimizer.optimizer.state


def test_refusals() -> None:
    net = mlp()
    inner = optim.SGD(net.parameters(), lr=0.1)
    options: list[dict[str, Any]] = [
        {"rank": 0},
        {"alpha": -1.0},
        {"history": 0.0},
        {"every": 0},
    ]
    for option in options:
        with pytest.raises(UserError, match=r"^NaturalGradient of rank.*needs rank ≥ 1, alpha ≥ 0[^\n]*$"):
            NaturalGradient(inner, net, **option)
    with pytest.raises(UserError, match="trains no linear or convolution layer"):
        NaturalGradient(inner, nn.Linear(2, 2))
    with pytest.raises(UserError, match="have no shape yet"):
        NaturalGradient(inner, nn.LazyLinear(2))
    optimizer = NaturalGradient(inner, net)
    with pytest.raises(UserError, match="already"):
        NaturalGradient(optimizer, net)
    with pytest.raises(UserError, match=r"gradients of 0 are natural already: remove\(\)"):
        NaturalGradient(optim.SGD(net.parameters(), lr=0.1), net)
    with pytest.raises(UserError, match="add it to the optimizer before"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such


def test_removed_hooks_are_gone() -> None:
    net = mlp()
    optimizer = wrapped(net)
    train(net, optimizer, range(3))
    optimizer.remove()
    plain = gradients(net, 3)
    net.zero_grad()
    backward(net, 3)
    assert all(torch.equal(p.grad, plain[name]) for name, p in net.named_parameters())
    wrapped(net)


def test_a_plain_optimizer_has_no_use_for_the_loss() -> None:
    with_loss, without = mlp(), mlp()
    for net, loss in ((with_loss, 1.0), (without, None)):
        optimizer = wrapped(net)
        backward(net, 0)
        assert optimizer.step(loss=loss) is None
    assert torch.equal(vector(with_loss), vector(without))
