"""Who trains in `bytes_at_quality.py`, and what of each was tried before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import nn, optim

import hpcsgd
from hpcsgd.methods.diloco import MakeOptimizer
from hpcsgd.parts import quantizers

EVERY = 64
"""H, steps from one meeting to the next."""
EVERY_BY_GROUPS = 6
"""SparseLoCo's is so many times P: what a rank sends at its meetings grows with P."""
FRAGMENTS = 4
BETAS, DECAY = (0.9, 0.95), 0.1
Settings = Mapping[str, float]
BSP, DILOCO, STREAMED = "bsp", "DiLoCo", "streamed, 4 bits"
SPARSE, MULOCO = "SparseLoCo", "MuLoCo, 4 bits"


@dataclass(frozen=True)
class Contestant:
    method: Callable[[Settings, int], hpcsgd.Method]
    """Of a trial, for so many groups."""
    trials: Sequence[Settings]
    """What is tried, as many for everybody; the best one is taken."""
    optimizer: Callable[[nn.Module, Settings], optim.Optimizer]
    """Inside a group, of the trial's `lr`."""


def adamw(model: nn.Module, s: Settings) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=s["lr"], betas=BETAS, weight_decay=DECAY)


def muon(model: nn.Module, s: Settings) -> optim.Optimizer:
    return hpcsgd.muon(model, lr=s["lr"], weight_decay=DECAY, rest={"betas": BETAS})


RATES = (4e-3, 8e-3)
"""Inside a group, of all that have an outer one besides."""
MOMENTUM = 0.8
"""Outside. The papers' 0.9 looks back on ten meetings, a sixth of all here: DiLoCo was worse with it."""
DELAY, BLEND = 1, 0.0
"""Of streams. With the paper's blend of a half groups take half of an outer step: it was worse."""


def nesterov(s: Settings) -> MakeOptimizer:
    return lambda ws: optim.SGD(ws, lr=s["outer_lr"], momentum=s["momentum"], nesterov=True)


def in_four_bits(s: Settings) -> hpcsgd.Method:
    return hpcsgd.diloco(EVERY, outer=nesterov(s), quantize=quantizers.int4(block=256))


def grid(**values: Sequence[float]) -> list[Settings]:
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


def with_outer(**inner: Sequence[float]) -> list[Settings]:
    return grid(**inner, outer_lr=(0.7, 1.0), momentum=(MOMENTUM,))


CONTESTANTS: dict[str, Contestant] = {
    BSP: Contestant(lambda s, _: hpcsgd.bsp(), grid(lr=(8e-3, 16e-3, 24e-3, 32e-3)), adamw),
    DILOCO: Contestant(lambda s, _: hpcsgd.diloco(EVERY, outer=nesterov(s)), with_outer(lr=RATES), adamw),
    STREAMED: Contestant(
        lambda s, _: hpcsgd.streaming(in_four_bits(s), FRAGMENTS, int(s["delay"]), s["blend"]),
        with_outer(lr=RATES, delay=(DELAY,), blend=(BLEND,)),
        adamw,
    ),
    SPARSE: Contestant(
        lambda s, groups: hpcsgd.sparseloco(EVERY_BY_GROUPS * groups, lr=s["outer_lr"]),
        grid(lr=RATES, outer_lr=(1.0, 1.4)),
        adamw,
    ),
    MULOCO: Contestant(lambda s, _: in_four_bits(s), with_outer(lr=RATES), muon),
}
