"""Several optimizers work as one with torch, schedulers and scalers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd import ChainedOptimizer, DistributedOptimizer, UserError, bsp, muon
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.engine.initial_state import like_new
from references import batch, loss, vector
from references import model as make_model


def parts(net: nn.Module) -> list[optim.Optimizer]:
    params = list(net.parameters())
    return [
        optim.SGD([{"params": params[:1], "lr": 0.2}, {"params": params[1:3]}], lr=0.1, momentum=0.9),
        optim.AdamW(params[3:], lr=0.01),
    ]


def steps(net: nn.Module, step: Callable[[], object], first: int, last: int) -> None:
    for t in range(first, last):
        net.zero_grad()
        loss(net, *batch(t, 0)).backward()
        step()


def test_it_does_what_its_parts_do() -> None:
    """The chain makes the updates of its parts, also with a scheduler."""
    apart, together = make_model(), make_model()
    mine, joined = parts(apart), ChainedOptimizer(*parts(together))
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (*mine, joined)]
    for t in range(3):
        steps(apart, lambda: [each.step() for each in mine], t, t + 1)
        steps(together, joined.step, t, t + 1)
        for scheduler in schedulers:
            scheduler.step()
    assert torch.equal(vector(apart), vector(together))
    assert [g["lr"] for g in joined.param_groups] == [g["lr"] for each in mine for g in each.param_groups]


@pytest.mark.parametrize("copied", [True, False])
def test_its_state_goes_on(copied: bool) -> None:
    net = make_model()
    joined = ChainedOptimizer(*parts(net))
    steps(net, joined.step, 0, 2)
    if copied:
        other, other_joined = copy.deepcopy((net, joined))
    else:
        other = make_model(seed=1)
        other_joined = ChainedOptimizer(*parts(other))
        steps(other, other_joined.step, 0, 1)
        other.load_state_dict(net.state_dict())
        other_joined.load_state_dict(copy.deepcopy(joined.state_dict()))
    other_joined.param_groups[0]["lr"] = joined.param_groups[0]["lr"] = 0.3
    for each, optimizer in ((net, joined), (other, other_joined)):
        steps(each, optimizer.step, 2, 4)
    assert torch.equal(vector(net), vector(other))
    assert set(other_joined.state) == set(other.parameters())
    assert all(part.state is other_joined.state for part in other_joined.parts)


def test_parts_with_a_past_keep_it() -> None:
    nets = [make_model(), make_model()]
    theirs = parts(nets[0])
    steps(nets[0], lambda: [each.step() for each in theirs], 0, 4)
    mine = parts(nets[1])
    steps(nets[1], lambda: [each.step() for each in mine], 0, 2)
    steps(nets[1], ChainedOptimizer(*mine).step, 2, 4)
    assert torch.equal(vector(nets[0]), vector(nets[1]))


def test_a_closure_is_called_once() -> None:
    net, calls = make_model(), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        value = loss(net, *batch(0, 0))
        value.backward()
        return value

    assert ChainedOptimizer(*parts(net)).step(closure) > 0
    assert calls == [True]


def test_a_new_one_has_new_parts() -> None:
    net = make_model()
    joined = ChainedOptimizer(*parts(net))
    steps(net, joined.step, 0, 1)
    fresh = like_new(joined, [group["params"] for group in joined.param_groups])
    assert not fresh.state
    assert isinstance(fresh, ChainedOptimizer)
    assert [type(part) for part in fresh.parts] == [optim.SGD, optim.AdamW]
    only = like_new(joined, [[], [], joined.param_groups[2]["params"]])
    assert [g["lr"] for g in only.param_groups] == [0.01]


def test_what_cannot_be_joined() -> None:
    net = make_model()
    params = list(net.parameters())
    sgd = optim.SGD(params[:2], lr=0.1)
    for made, told in [
        ((), "one optimizer or more"),
        ((sgd, optim.AdamW(params[1:])), "in two of the optimizers"),
        ((ChainedOptimizer(sgd), optim.AdamW(params[2:])), "all at once"),
        ((optim.LBFGS(params),), "LBFGS"),
        ((sgd, net), "parts = an object of type Sequential: expected a torch optimizer"),
    ]:
        with pytest.raises(UserError, match=told):
            ChainedOptimizer(*made)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="before"):
        ChainedOptimizer(sgd).add_param_group({"params": params[2:]})


def test_it_goes_inside() -> None:
    def wrap(world: Communicator) -> None:
        net = make_model()
        wrapped = DistributedOptimizer(optim.SGD(net.parameters(), lr=0.1), net, form(world), bsp())
        with pytest.raises(UserError, match="ChainedOptimizer goes inside"):
            ChainedOptimizer(wrapped)

    threads.run(1, wrap)


class Kinds(nn.Module):
    """A model with embeddings, convolutions, hidden layers and an output."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(5, 4), nn.EmbeddingBag(3, 4)
        self.conv = nn.Conv2d(1, 2, 2)
        self.hidden = nn.Linear(4, 4)
        self.square = nn.Parameter(torch.ones(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.LayerNorm(4)
        self.scores = nn.Linear(4, 5)
        if tied:
            self.scores.weight = self.words.weight


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_matrices_are_muon_s(tied: bool) -> None:
    net = Kinds(tied=tied)
    made = muon(net, 0.02, rest={"lr": 0.001, "betas": [0.8, 0.9]})
    first, second = made.param_groups
    names = {p: n for n, p in net.named_parameters()}
    assert {names[p] for p in first["params"]} == {"square", "hidden.weight"}
    assert {names[p] for p in second["params"]} == {
        n for n, p in net.named_parameters() if p.requires_grad and n not in {"square", "hidden.weight"}
    }
    assert (first["lr"], second["lr"], second["betas"]) == (0.02, 0.001, (0.8, 0.9))
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.1)
    assert first["adjust_lr_fn"] == "match_rms_adamw"


def test_which_matrices_may_be_said() -> None:
    net = Kinds(tied=False)
    made = muon(net, 0.02, hidden=["hid*.weight", "scores.weight"])
    assert [id(p) for p in made.param_groups[0]["params"]] == [id(net.hidden.weight), id(net.scores.weight)]
    with pytest.raises(UserError, match=r"called 'hidden\.bias'"):
        muon(net, 0.02, hidden=["hidden.bias"])
    with pytest.raises(UserError, match="no hidden matrices"):
        muon(nn.Sequential(nn.Linear(3, 3)), 0.02)
    alone = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    assert len(muon(alone, 0.02, hidden=["*"]).param_groups) == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"momentum": 1.0}, "muon: momentum = 1.0: expected a number ≥ 0 and < 1"),
        ({"ns_steps": 100}, "muon: ns_steps = 100: expected a number of iterations from 1 to 99"),
        (
            {"rest": {"lr": -1.0}},
            "muon: rest = {'lr': -1.0}: AdamW does not take it: Invalid learning rate: -1.0",
        ),
        (
            {"rest": {"betas": 0.9}},
            "muon: rest = {'betas': 0.9}: AdamW does not take it: 'float' object is not subscriptable",
        ),
    ],
)
def test_what_muon_refuses(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        muon(Kinds(tied=False), 0.02, **options)
    assert str(refused.value) == line


def test_an_older_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(optim, "Muon")
    with pytest.raises(UserError, match=r"has no Muon: it needs torch 2\.9"):
        muon(make_model(), 0.02, hidden=["0.weight"])
