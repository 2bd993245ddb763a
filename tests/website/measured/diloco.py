"""Figures in docs/diloco.md about loss and bytes."""

from __future__ import annotations

from statistics import mean, stdev

from bytes_at_quality.contestants import BSP, DILOCO, MULOCO, SPARSE, STREAMED
from bytes_at_quality.judging import finals, ratios
from website.measured.results import megabytes, result, table

STREAMING = "`streaming(diloco(64, quantize=quantizers.int4(block=256)), 4, 1, update_alpha=0)`"
LINES = [
    ("`bsp()`", 4, BSP),
    ("`diloco(64)`", 4, DILOCO),
    (STREAMING, 4, STREAMED),
    ("the same `diloco` with `muon` inside", 4, MULOCO),
    ("`sparseloco(24)`", 4, SPARSE),
    ("`bsp()`", 8, BSP),
    ("`diloco(64)`", 8, DILOCO),
    ("`sparseloco(48)`", 8, SPARSE),
]


def loss(groups: int, who: str) -> str:
    """Return the ratio of a method's loss to that of bsp, with the standard error over the seeds."""
    found = result("bytes_at_quality")["rows"]
    apart = ratios(finals(found, who, groups), finals(found, BSP, groups), "test_loss")
    assert len(apart) == 3
    return "1" if who == BSP else f"{mean(apart):.3f} ± {stdev(apart) / len(apart) ** 0.5:.3f}"


def sent(groups: int, who: str) -> str:
    found = finals(result("bytes_at_quality")["rows"], who, groups)
    return megabytes(mean(row["bytes"] for row in found.values()))


def quality() -> str:
    return table([name, groups, loss(groups, who), sent(groups, who)] for name, groups, who in LINES)


def model() -> str:
    (parameters,) = {row["parameters"] for row in result("bytes_at_quality")["rows"]}
    return f"A GPT of {parameters / 1e6:.2f} million parameters"
