"""Figures in docs/performance.md about steps on one host."""

from __future__ import annotations

from website.measured.results import row, table, with_quartiles

DDP = "DistributedDataParallel (gloo): the faster of its defaults and a tuned one"
LOCAL = "torch's local SGD, 2 × 2"
LINES = [
    ("1 rank, `bsp`", "plain torch", 1, "hpcsgd bsp", "plain torch"),
    ("1 rank, `hierarchical`", "plain torch", 1, "hpcsgd hierarchical", "plain torch"),
    ("4 ranks, `bsp`, 1 × 4", DDP, 4, "hpcsgd bsp 1×4", "DDP tuned"),
    ("4 ranks, `hierarchical`, 2 × 2", LOCAL, 4, "hpcsgd hierarchical 2×2", "torch local SGD 2×2"),
]  # fmt: skip
MODELS = ("ResNet-20", "MLP 25M")


def ratio(ranks: int, who: str, against: str, model: str) -> str:
    return with_quartiles(row("step_overhead", ranks=ranks, who=who, against=against, model=model)["ratio"])


def speed() -> str:
    return table(
        [name, baseline, *(ratio(ranks, who, against, model) for model in MODELS)]
        for name, baseline, ranks, who, against in LINES
    )


BY_GROUPS = {"1 × 4": "`bsp`", "2 × 2": "`hierarchical(8)`"}


def backends() -> str:
    return table(
        [
            f"{method}, {groups}",
            *(with_quartiles(row("backends", model=model, groups=groups)["ratio"], 2) for model in MODELS),
        ]
        for groups, method in BY_GROUPS.items()
    )
