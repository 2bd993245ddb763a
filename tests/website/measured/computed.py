"""Figures that follow from formulas, from formats of messages and from the sizes of models."""

from __future__ import annotations

from functools import cache
from math import log
from typing import Any

import torch
from torch import Tensor

from hpcsgd.kernels import chosen
from hpcsgd.methods.sparseloco import VALUES
from hpcsgd.models import build
from hpcsgd.parts import quantizers
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.quantizers.mean import decoded
from website.measured.looking import tables
from website.measured.results import ROOT

N = 1 << 18
"""Elements of which a message is measured; a multiple of all blocks."""
BLOCK, SELECTED = 4096, 64
"""The elements of a block of `sparseloco`, and those of them that are sent."""
WORDS = 33_278
"""The types of WikiText-2."""
MODELS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "resnet20": ("{:.2f} to {:.1f}", [("resnet20", {}), ("resnet110", {})]),
    "resnet10": ("{:.1f} and {:.1f}", [("resnet10", {}), ("resnet18", {})]),
    "resnet50": ("{:.1f} and {:.1f}", [("resnet50", {}), ("resnet101", {})]),
    "vgg11": ("{:.1f}", [("vgg11", {})]),
    "alexnet": ("{:.1f}", [("alexnet", {})]),
    "lstm": (f"{{:.1f}} ({WORDS:,} types)", [("lstm", {"types": WORDS})]),
    "transformer": (f"{{:.1f}} ({WORDS:,} types)", [("transformer", {"types": WORDS})]),
    "edsr": (
        "{:.1f} and {:.1f}; {:.1f} with 16 blocks of 64",
        [("edsr", {"scale": 2}), ("edsr", {"scale": 4}), ("edsr", {"blocks": 16, "width": 64})],
    ),
}
"""By the first name in a row of the table of docs/data.md: its last cell, and the models in it."""


def fewer(quantizer: Quantizer) -> float:
    """Return how many times fewer bytes than float32 a quantizer sends."""
    return 4 * N / quantizer.nbytes(N)


def quantized() -> str:
    four, two = fewer(quantizers.int4()), fewer(quantizers.int2())
    return (
        f"quantize=quantizers.int4())` | 1/({four:.1f}·I) |\n"
        f"| `diloco(I, quantize=quantizers.int2())` | 1/({two:.1f}·I) |"
    )


def streaming() -> str:
    """Return what the example in docs/diloco.md sends, whose interval is 60."""
    return f"It sends 1/{60 * fewer(quantizers.int4()):.0f} of what `bsp` sends"


def two_bits() -> str:
    """Return the share of the energy that `int2` loses, for normal and for Laplace's numbers."""
    chance = torch.Generator().manual_seed(0)
    normal = torch.randn(N, generator=chance)
    signs = torch.randint(2, (N,), generator=chance) * 2 - 1
    laplaces = signs * torch.empty(N).exponential_(generator=chance)
    of_normal, of_laplaces = (f"{100 * lost(x):.0f}" for x in (normal, laplaces))
    return f"`int2` loses {of_normal} % of the energy of normal numbers, and {of_laplaces} % of Laplace's."


def lost(x: Tensor) -> float:
    quantizer = quantizers.int2()
    code = torch.zeros(quantizer.nbytes(N), dtype=torch.uint8)
    quantizer.encode(x, code, 0)
    return ((decoded(code, N, quantizer) - x).square().sum() / x.square().sum()).item()


def index_bytes(k: int) -> int:
    """Return the bytes that say which k elements of a block are sent."""
    return chosen.code_bytes(torch.tensor([BLOCK]), torch.tensor([k]))


def index_code() -> str:
    over = {k: f"{8 * index_bytes(k) / chosen.entropy(BLOCK, k):.2f}" for k in (32, 64, 128, 256, 410, 512)}
    assert over[256] == over[410]
    return (
        f"{over[32]} (k = 32 of 4096), {over[64]} (64), {over[128]} (128), {over[256]} (256 and 410), "
        f"{over[512]} (512)"
    )


def sparseloco() -> str:
    values = VALUES[2].nbytes(SELECTED * N) / N
    times = 2 * 4 * BLOCK / (index_bytes(SELECTED) + values)
    return (
        f"`sparseloco` sends P/{times:.0f} of what `diloco` sends, and P/({times:.0f}·H) of what `bsp` sends "
        f"between groups: 1/{round(30 * times / 8, -1):.0f} for 8 groups and H = 30."
    )


def forgotten() -> str:
    return f"With AdamW, 32 local steps leave 0.9³² = {100 * 0.9**32:.0f} % of an averaged momentum."


def half_life(beta: float) -> float:
    """Return the steps after which a moment has forgotten half of its past."""
    return log(0.5) / log(beta)


def momentum() -> str:
    return (
        f"ln 0.5 / ln β₁ steps, should exceed `sync_every`: {half_life(0.9):.1f} steps for 0.9, "
        f"{half_life(0.995):.0f} for 0.995."
    )


def second_moment() -> str:
    return f"ln 0.5 / ln β steps, {half_life(0.999):.0f} for β = 0.999;"


@cache
def millions(name: str, *arguments: tuple[str, Any]) -> float:
    """Return the parameters of a model, which is built without values."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, dict(arguments)).parameters()) / 1e6


def models() -> str:
    """Return the table of models in docs/data.md with the numbers of parameters of today's models."""
    (found,) = (each for each in tables((ROOT / "docs/data.md").read_text()) if each.startswith("| `mlp`"))
    return "\n".join(with_parameters(line) for line in found.splitlines())


def with_parameters(line: str) -> str:
    """Return a row of the table whose last cell has the numbers of parameters."""
    name = line.split("`")[1]
    if name not in MODELS:
        return line
    cell, built = MODELS[name]
    words = cell.format(*(millions(each, *arguments.items()) for each, arguments in built))
    return f"{line.rsplit('|', 2)[0]}| {words} |"


def small_vgg() -> str:
    small = millions("vgg11", ("classes", 10), ("hidden", ()), ("pooled", 1))
    return f"with `hidden = []`, `pooled = 1` 32 × 32 ({small:.1f})"
