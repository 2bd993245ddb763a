"""The battery with an awkward model and awkward optimizers.

Each rank uses other parts of the model in each step, and the model's size is a prime. Parameter groups have
learning rates of their own, and another order than the model's parameters.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim

import local_methods
import packing
import radial
import references
import sparse_deltas
import sparsifying
from methods import table
from methods.table import EVERY, RATES, REFERENCES, STEPS
from references import BATCH, MakeOptimizer, distributed, same

BRANCHES = 5
SHAPES = [(1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1)]
OFTEN = {"plain": SHAPES, "momentum": [(2, 2)], "AdamW": [(1, 4), (2, 2), (3, 2), (4, 1)]}
"""The shapes that `make test-all` runs with each optimizer."""
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "plain": lambda params: optim.SGD(groups_of(params), lr=0.1),
    "momentum": lambda params: optim.SGD(
        groups_of(params, lr=0.03, weight_decay=0.1, momentum=0.5), lr=0.1, momentum=0.9
    ),
    "AdamW": lambda params: optim.AdamW(groups_of(params, lr=0.02, betas=(0.8, 0.9)), lr=0.01, amsgrad=True),
}


def groups_of(params: list[nn.Parameter], **options: object) -> list[dict[str, object]]:
    """Return two parameter groups; the first has `options` of its own."""
    return [{"params": params[1::2], **options}, {"params": params[::2]}]


class Branches(nn.Module):
    """A model whose batch decides which layers are used; the others, which are most, have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.branches = nn.ModuleList(nn.Linear(7, 3) for _ in range(BRANCHES))
        self.scale = nn.Parameter(torch.ones(()))
        self.double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.branches[which(rank)](self.trunk(rank).tanh()) for rank in x.split(BATCH)]
        return torch.cat(rows) * self.scale


def which(x: Tensor) -> int:
    return int(x.abs().sum().item() * 1000) % BRANCHES


def test_ranks_do_use_other_parts() -> None:
    used = [{which(references.batch(t, rank)[0]) for rank in range(4)} for t in range(STEPS)]
    assert sum(len(parts) > 1 for parts in used) > STEPS // 2
    assert len({which(references.batch(t, 0)[0]) for t in range(EVERY)}) < BRANCHES


def test_the_size_is_a_prime() -> None:
    M = sum(p.numel() for p in Branches().parameters())
    assert all(M % n for n in range(2, M))


@pytest.mark.threads(
    unless={"P": 2, "K": 2, "optimizer": {"AdamW", "plain"}, "method": {"hierarchical", "sasgd", "sgp"}}
)
@pytest.mark.parametrize(
    ("P", "K", "method", "optimizer"),
    [
        pytest.param(P, K, label, name, marks=[] if (P, K) in OFTEN[name] else [pytest.mark.long])
        for label, case in REFERENCES.items()
        for name in (["plain"] if case.plain_sgd else ["momentum", "AdamW"])
        for P, K in SHAPES
    ],
)
def test_equals_plain_torch(
    run, monkeypatch: pytest.MonkeyPatch, method: str, P: int, K: int, optimizer: str
) -> None:
    for module in (references, local_methods, packing, radial, sparse_deltas, sparsifying, table):
        monkeypatch.setattr(module, "model", lambda *_, **__: Branches())
    case, make = REFERENCES[method], OPTIMIZERS[optimizer]
    ranks = run(
        P * K, lambda world: distributed(world, P, case.new(), make, STEPS, rates=RATES, form=case.form)
    )
    same(ranks, case.expected(P, K, make), K)
