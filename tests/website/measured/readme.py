"""Figures in the README about performance."""

from __future__ import annotations

from probe_vs_accuracy import means, parted
from time_to_quality.judging import over_ddp
from website.measured import diloco, probe
from website.measured.results import goal, result, row, rows, table

FOUR = "4 hosts × 2 ranks"


NAMES = {
    "hierarchical": "`hierarchical(8)`",
    "streaming DiLoCo, int4": "streaming `diloco(16)` in 4 bits",
    "DDP, PowerSGD hook": "DDP with PowerSGD of rank 1",
    "torch PostLocalSGD": "torch's PostLocalSGDOptimizer",
}
"""The contestants of `time_to_quality.py`, as the README calls them."""


def quality() -> str:
    """Return how long each contestant takes to DDP's quality, relative to DDP."""
    found = {who: over_ddp(rows("time_to_quality"), "gpt", "100mbit", who) for who in NAMES}
    times = [f"{NAMES[who]} in {ratio.median:.2f}" for who, ratio in found.items() if ratio is not None]
    return f"They reach DDP's final quality in a fraction of DDP's time: {', '.join(times)}."


def model() -> str:
    (parameters,) = {each["parameters"] for each in rows("time_to_quality")}
    return f"A GPT of {parameters / 1e6:.1f} million parameters"


def missed() -> str:
    """Return what benchmarks/README.md says about the goal for the time to quality."""
    ratio = goal("time_to_quality", "streaming DiLoCo, int4, time to DDP's quality over DDP's")
    return f"missed so far: streaming DiLoCo takes {ratio:.3f} of it."


def bold(*numbers: float, digits: int = 2) -> str:
    return "; ".join(f"**{each:.{digits}f}**" for each in numbers)


def step_time(rate: str) -> str:
    return bold(
        *(
            row("step_time", who=who, rate=rate, model="6 M")["ratio"]["median"]
            for who in ("hierarchical(8)", "delayed(8)")
        )
    )


def speed() -> str:
    on_one_host = (
        row("step_overhead", ranks=4, model=model, who="hpcsgd bsp 1×4")["ratio"]["median"]
        for model in ("ResNet-20", "MLP 25M")
    )
    sharded = (
        row("sharded", who="hierarchical(8)", rate=rate, P=4, K=2)["ratio"]["median"]
        for rate in ("1gbit", "100mbit")
    )
    return table(
        [
            [
                "4 ranks on one host, `bsp`: ResNet-20; MLP of 25 M parameters", "DDP (gloo)",
                bold(*on_one_host, digits=3),
                "`benchmarks/step_overhead.py`, [performance](docs/performance.md)",
            ],
            [
                f"{FOUR}, 1 Gbit/s: `hierarchical(8)`; with `delayed` around it", "DDP (gloo)",
                step_time("1gbit"),
                "`benchmarks/step_time.py`, [hiding synchronization](docs/late.md)",
            ],
            [
                f"{FOUR}, 100 Mbit/s: `hierarchical(8)`; with `delayed` around it", "DDP (gloo)",
                step_time("100mbit"),
                "the same, [hiding synchronization](docs/late.md)",
            ],
            [
                f"FSDP in groups, {FOUR}: `hierarchical(8)` at 1 Gbit/s; at 100 Mbit/s", "HSDP (torch)",
                bold(*sharded), "`benchmarks/sharded.py`, [FSDP](docs/shard.md)",
            ],
        ]
    )  # fmt: skip


def accuracy() -> str:
    _, trained = parted(
        result("probe_vs_accuracy")["rows"], [probe.JOBS["5000 images of CIFAR-10, ResNet-20, 15 epochs"]]
    )
    one, two, four = (f"**{means(trained)[P]:.3f}**" for P in (1, 2, 4))
    return f"averaging every 8 steps: {one} with one group, {two} with two, {four} with four ([probe]"


def loss() -> str:
    four, eight = (diloco.loss(groups, diloco.DILOCO).partition(" ")[0] for groups in (4, 8))
    return (
        f"with `diloco(64)` was **{four}** times that of `bsp` with four groups, **{eight}** times with eight"
    )
