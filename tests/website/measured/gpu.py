"""Figures in docs/gpu.md about speed on one H200, and in benchmarks/README.md about kernels."""

from __future__ import annotations

from website.measured.results import Row, from_to, goal, row, table, with_quartiles

GPT, COMPILED, RESNET = "GPT 124M, bf16", "GPT 124M, bf16, compiled", "ResNet-50, bf16, channels last"
LINES = [
    ("GPT of 124 M parameters, 32 × 1024 tokens", "gpu/second_one_rank", GPT, 3),
    ("the same, 4 × 512 tokens", "gpu/first_quick", GPT, 2),
    ("the same, 4 × 512 tokens, compiled", "gpu/first_quick", COMPILED, 2),
    ("ResNet-50, channels last, 32 images", "gpu/first_quick", RESNET, 2),
]


def step(result: str, model: str, who: str) -> Row:
    return row(result, section="one_rank", part="step", model=model, who=who)


def speed() -> str:
    lines = []
    for name, result, model, digits in LINES:
        plain = step(result, model, "plain torch")["seconds"]["median"]
        ratios = [step(result, model, who)["ratio"] for who in ("bsp", "hierarchical(8)")]
        lines.append([name, f"{1e3 * plain:.1f}", *(with_quartiles(each, digits) for each in ratios)])
    return table(lines)


def selected(of: str, rival: str) -> list[float]:
    """Return, for both runs, the time of selecting 1 % of the elements over that of `rival`."""
    return [goal(f"gpu/{run}", f"{of} normal, 1.0%: ours over {rival}") for run in ("first", "second")]


def selection() -> str:
    topk, copies = selected("16,000,000", "torch.topk"), selected("16,000,000", "copy")
    (_, of_topk), (_, of_copy) = selected("256,000,000", "torch.topk"), selected("256,000,000", "copy")
    return (
        f"Selecting 1 % of 256 million elements takes {of_topk:.3f} of `torch.topk`'s time and {of_copy:.2f} "
        f"of a copy's; of 16 million elements, {from_to(topk, 2)} of `torch.topk` and {from_to(copies, 1)} "
        "copies."
    )


def packing() -> str:
    pack, unpack = (
        goal("gpu/second", f"256,000,000: {what} int8 over a copy") for what in ("pack", "unpack")
    )
    return f"Packing int8 takes {pack:.2f} of a copy's time, unpacking {unpack:.2f}."
