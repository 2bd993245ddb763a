"""The battery with a model of which each group, and each rank of a group, uses other parts in each step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import local_methods
import references
import sparsifying
from methods.test_battery import EVERY, METHODS, OPTIMIZERS, STEPS, expected
from references import BATCH, distributed

BRANCHES = 5
SHAPES = [(1, 1), (1, 2), (2, 1), (3, 1), (2, 2), (4, 1), (1, 4)]


class Branches(nn.Module):
    """Which of its layers a rank's batch goes through, the batch decides; most have no gradient then.

    `touched`: all have one, of zeros, as where gradients are exchanged."""

    def __init__(self, touched: bool) -> None:
        super().__init__()
        self.touched = touched
        self.trunk = nn.Linear(5, 7)
        self.branches = nn.ModuleList(nn.Linear(7, 3) for _ in range(BRANCHES))
        self.double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.branches[which(rank)](self.trunk(rank).tanh()) for rank in x.split(BATCH)]
        y = torch.cat(rows)
        return y + 0 * sum(p.sum() for p in self.parameters()) if self.touched else y


def which(x: Tensor) -> int:
    return int(x.abs().sum().item() * 1000) % BRANCHES


def all_have_gradients(method: str, P: int, K: int) -> bool:
    """Where nothing is exchanged, gradients stay away as in plain torch."""
    return K > 1 or (P > 1 and (method.startswith("bsp") or method == "post-local SGD"))


@pytest.fixture
def branching(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def use(touched: bool) -> None:
        for module in (references, local_methods, sparsifying):
            monkeypatch.setattr(module, "model", lambda *_, **__: Branches(touched))

    return use


def test_ranks_do_use_other_parts() -> None:
    used = [{which(references.batch(t, rank)[0]) for rank in range(4)} for t in range(STEPS)]
    assert sum(len(parts) > 1 for parts in used) > STEPS // 2
    assert len({which(references.batch(t, 0)[0]) for t in range(EVERY)}) < BRANCHES


@pytest.mark.threads(unless={"P": 2, "K": 2, "optimizer": "AdamW"})
@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_equals_plain_torch(run, branching: Callable, method: str, P: int, K: int, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    branching(touched=False)
    ranks = run(P * K, lambda world: distributed(world, P, METHODS[method](), make, STEPS))
    branching(touched=all_have_gradients(method, P, K))
    alone = "hierarchical" if K == 1 and "DEFT" in method else method  # a group of one exchanges nothing
    for t, groups in enumerate(expected(alone, P, K, make)):
        for rank, history in enumerate(ranks):
            torch.testing.assert_close(history[t], groups[rank // K], rtol=0, atol=1e-12)
