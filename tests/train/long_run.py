"""A program for `test_long_runs`, which every rank runs.

It trains a small model for many steps, and a large one for a few. It writes the resources that it used and
those that a formula predicts for the large model.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn, optim

import hpcsgd
from hpcsgd.core.layout import bucket_bytes, nbytes
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.memory import kept
from hpcsgd.engine.plan import StepPlan
from hpcsgd.methods import Method, bsp, delayed, diloco, hierarchical, streaming
from hpcsgd.parts import quantizers
from hpcsgd.parts.grad_reduces import Quantized
from train import watched

EVERY = 8
SEEN_AFTER = (25 * EVERY, 67 * EVERY, 109 * EVERY, 150 * EVERY)
"""The steps after which the resources are recorded."""
METHODS: dict[str, Callable[[], Method]] = {
    "bsp": bsp,
    "hierarchical": lambda: hierarchical(EVERY),
    "packed": lambda: hierarchical(
        EVERY, Quantized(quantizers.int8(), quantizers.bf16()), quantize=quantizers.int4()
    ),
    "delayed": lambda: delayed(hierarchical(EVERY, quantize=quantizers.int4()), 2),
    "streaming": lambda: streaming(diloco(EVERY), 4, 4),
}


def trained(
    topology: hpcsgd.Topology, method: Method, width: int, depth: int
) -> tuple[nn.Module, Callable[[int], None]]:
    """Return a model and a function that makes a number of steps."""
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    inner = optim.AdamW(net.parameters(), lr=1e-3)
    optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, method)
    generator = torch.Generator().manual_seed(topology.rank)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            value = net(torch.randn(2, width, generator=generator)).square().mean()
            value.backward()
            optimizer.step(loss=value.detach())

    return net, train


def main(name: str) -> None:
    topology = hpcsgd.init(groups=2)
    _, train = trained(topology, METHODS[name](), width=16, depth=3)
    seen: list[dict[str, int]] = []
    for before, after in pairwise((0, *SEEN_AFTER)):
        train(after - before)
        time.sleep(1)  # until a pending synchronization has ended
        seen.append(watched.now())
    method = METHODS[name]()
    net, train = trained(topology, method, width=512, depth=16)
    m = ModelLayout.of(
        net.named_parameters(),
        topology.num_groups,
        topology.group_size,
        bucket_bytes(nbytes(net.parameters())),
    )
    train(2 * EVERY)
    time.sleep(1)
    grown = watched.now()["bytes"] - seen[-1]["bytes"]
    formula = {"expected": kept(StepPlan.of(method), m, moments=2), "model": m.K * m.own_elements()}
    told = {"seen": seen, "grown": grown, **formula}
    Path(f"seen-{topology.rank}").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
