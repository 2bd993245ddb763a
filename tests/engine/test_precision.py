"""The precisions of a job file: what they compute in, and which steps they skip."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from hpcsgd.engine.precision import PRECISIONS, precision
from hpcsgd.errors import UserError
from hpcsgd.methods import hierarchical
from references import batch, loss, model, vector

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("bf16_master", torch.bfloat16),
    ],
)
def test_what_is_computed_in(name: str, dtype: torch.dtype) -> None:
    made = precision(name, CPU)
    with made.computing():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
    assert (made.scaler is not None) == (name == "fp16")
    assert (made.master is not None) == (name == "bf16_master")


@pytest.mark.parametrize("name", [name for name in PRECISIONS if name != "fp32"])
def test_a_device_that_has_none(name: str) -> None:
    with pytest.raises(UserError, match=f"precision = {name}: torch has no autocast for meta; allowed: fp32"):
        precision(name, torch.device("meta"))
    assert precision("fp32", torch.device("meta")).computes is None


def test_without_more_it_is_the_plain_loop() -> None:
    nets = [model(dtype=torch.float32) for _ in range(2)]
    optimizers = [optim.SGD(net.parameters(), lr=0.1) for net in nets]
    loss(nets[0], *batch(0, 0, torch.float32)).backward()
    optimizers[0].step()
    made = precision("fp32", CPU)
    made.backward(loss(nets[1], *batch(0, 0, torch.float32)))
    assert made.step(optimizers[1])
    assert torch.equal(vector(nets[0]), vector(nets[1]))
    assert made.state_dict() == {}
    made.load_state_dict({"scale": 4.0})  # state of a run in float16


@pytest.mark.ranks(4)
def test_a_step_that_overflows_anywhere_is_made_by_nobody(run) -> None:
    """All ranks skip a step that overflows on one rank. A restart continues with the last loss scale."""

    def trained(world: Communicator) -> tuple[list[bool], list[int], float]:
        net = model(dtype=torch.float32)
        optimizer = hpcsgd.DistributedOptimizer(
            optim.SGD(net.parameters(), lr=0.1), net, form(world, groups=2), hierarchical(2)
        )
        made, before = precision("fp16", CPU), vector(net)
        steps, ts = [], []
        for t in range(4):
            optimizer.zero_grad()
            with made.computing():
                value = loss(net, *batch(t, world.rank, torch.float32))
            made.backward(value * float("inf") if (t, world.rank) == (2, 1) else value)
            steps.append(made.step(optimizer, loss=value))
            ts.append(optimizer.t)
            if t == 2:
                assert torch.equal(vector(net), before)
            before = vector(net)
        again = precision("fp16", CPU)
        again.load_state_dict(made.state_dict())
        assert again.state_dict() == made.state_dict()
        return steps, ts, made.state_dict()["scale"]

    for steps, ts, scale in run(4, trained):
        assert (steps, ts) == ([True, True, False, True], [1, 2, 2, 3])
        assert scale == 2.0**15
