"""Figures in docs/diloco.md and benchmarks/README.md about loss and bytes."""

from __future__ import annotations

from statistics import mean, stdev

from bytes_at_quality.contestants import (
    BSP,
    DILOCO,
    EVERY_BY_GROUPS,
    MULOCO,
    PIER,
    SCHEDULED,
    SPARSE,
    SPARSE_SCHEDULED,
    STREAMED,
    STREAMED_SCHEDULED,
)
from bytes_at_quality.judging import best, finals, ratios
from website.measured.results import megabytes, result, table

STREAMING = "`streaming(diloco(64, quantize=quantizers.int4(block=256)), 4, 1, update_alpha=0)`"
DENSITY = 1 / 64
"""The density of `sparseloco` if none is given."""
SCHEDULE, FALLING = ", `outer_schedule`", ", rate from 2 to 1"
LINES = [
    ("`bsp()`", 4, BSP),
    ("`diloco(64)`", 4, DILOCO),
    (STREAMING, 4, STREAMED),
    ("the same `diloco` with `muon` inside", 4, MULOCO),
    (f"`diloco(64)`{SCHEDULE}", 4, SCHEDULED),
    (f"streaming as above{SCHEDULE}", 4, STREAMED_SCHEDULED),
    ("`pier(64)`", 4, PIER),
    ("`sparseloco(24)`", 4, SPARSE),
    (f"`sparseloco(24)`{FALLING}", 4, SPARSE_SCHEDULED),
    ("`bsp()`", 8, BSP),
    ("`diloco(64)`", 8, DILOCO),
    (f"`diloco(64)`{SCHEDULE}", 8, SCHEDULED),
    ("`pier(64)`", 8, PIER),
    ("`sparseloco(48)`", 8, SPARSE),
    (f"`sparseloco(48)`{FALLING}", 8, SPARSE_SCHEDULED),
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


def parameters() -> str:
    (count,) = {row["parameters"] for row in result("bytes_at_quality")["rows"]}
    return f"{count / 1e6:.2f} million parameters"


def setting() -> dict[str, int]:
    first, *others = (row["setting"] for row in result("bytes_at_quality")["rows"])
    assert all(each == first for each in others)
    return first


def model() -> str:
    s = setting()
    text = s["steps"] * s["batch"] * s["window"]
    return f"A GPT of {parameters()} on {text / 1e6:.1f} million bytes of WikiText-2."


def not_measured() -> str:
    """Return what docs/choosing.md says about larger models."""
    return f"the loss of `diloco` and its successors with more than {parameters()}."


def as_in_the_papers() -> str:
    met = {
        (groups, who): each["met"]
        for each in result("bytes_at_quality")["goals"]
        for groups in (4, 8)
        for who in (STREAMED, SPARSE, MULOCO)
        if each["name"].startswith(f"{groups} groups: loss of {who} over")
    }
    assert met == {(groups, who): who == MULOCO for groups in (4, 8) for who in (STREAMED, SPARSE, MULOCO)}
    assert loss(4, STREAMED) < loss(4, DILOCO)
    return (
        "As in the papers, 4 bits, streaming and Muon cost nothing over DiLoCo. Unlike the papers, Streaming "
        "DiLoCo is **not** within half a percent of `bsp`, and SparseLoCo is **not** ahead of DiLoCo."
    )


def tuned() -> str:
    """Return the settings that were best, as benchmarks/README.md names them."""
    rows = result("bytes_at_quality")["rows"]
    contestants = [(who, groups) for who in (DILOCO, STREAMED, MULOCO, SPARSE) for groups in (4, 8)]
    of = {(who, groups): best(rows, who, groups) or {} for who, groups in contestants}
    slow, low, high = (SPARSE, 8), (MULOCO, 4), [(SPARSE, 4), (SPARSE, 8)]
    (inside,) = {each["lr"] for of_whom, each in of.items() if of_whom != slow}
    (outer,) = {each["outer_lr"] for of_whom, each in of.items() if of_whom not in (low, *high)}
    (sparse,) = {of[each]["outer_lr"] for each in high}
    bsp = (best(rows, BSP, 4) or {})["lr"]
    return (
        f"learning rates of {bsp:g} for AdamW with `bsp`, {inside:g} inside all others, and "
        f"{of[slow]['lr']:g} for `sparseloco` with 8 groups; an outer rate of {outer:g}, "
        f"{of[low]['outer_lr']:g} for MuLoCo with four groups, {sparse:g} for `sparseloco`."
    )


def by_schedule() -> str:
    """Return which outer schedule was the best in the trials, and what it changed."""
    found = result("bytes_at_quality")["rows"]
    for groups in (4, 8):
        assert (best(found, SCHEDULED, groups) or {})["schedule"] == "muloco"
        assert loss(groups, SCHEDULED) < loss(groups, DILOCO)
    gains = [
        float(loss(groups, DILOCO).split()[0]) - float(loss(groups, SCHEDULED).split()[0])
        for groups in (4, 8)
    ]
    assert max(gains) < 0.0105
    return (
        'The best `outer_schedule` was `"muloco"` with 4 and with 8 groups, and took at most 0.01 from the '
        "ratio of DiLoCo."
    )


def synchronizations() -> str:
    count = setting()["steps"] // (4 * EVERY_BY_GROUPS)
    assert 2 < count * DENSITY < 3
    return (
        f"With four groups, SparseLoCo synchronizes {count} times and sends 1/{1 / DENSITY:.0f} of the "
        "weights each time, so each weight is sent two or three times in all."
    )
