"""Figures in docs/gpu.md about speed on one H200, and in benchmarks/README.md about kernels."""

from __future__ import annotations

from website.measured.results import Row, from_to, goal, result, row, table, with_quartiles

GPT, COMPILED, RESNET = "GPT 124M, bf16", "GPT 124M, bf16, compiled", "ResNet-50, bf16, channels last"
LINES = [
    ("GPT of 124 M parameters, 32 × 1024 tokens", "gpu/second_one_rank", GPT, 3),
    ("the same, 4 × 512 tokens", "gpu/first_quick", GPT, 2),
    ("the same, 4 × 512 tokens, compiled", "gpu/first_quick", COMPILED, 2),
    ("ResNet-50, channels last, 32 images", "gpu/first_quick", RESNET, 2),
]


def step(run: str, model: str, who: str) -> Row:
    return row(run, section="one_rank", part="step", model=model, who=who)


def speed() -> str:
    lines = []
    for name, run, model, digits in LINES:
        plain = step(run, model, "plain torch")["seconds"]["median"]
        ratios = [step(run, model, who)["ratio"] for who in ("bsp", "hierarchical(8)")]
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


def missed() -> str:
    found = [
        each
        for run in ("first", "second")
        for each in result(f"gpu/{run}")["goals"]
        if each["name"].endswith("ours over copy")
    ]
    slow, fast = ({_elements(each) for each in found if each["met"] == met} for met in (False, True))
    assert not slow & fast
    (most,) = {each["goal"] for each in found}
    few, more = (f"{n / 1e6:g}" for n in sorted(slow))
    return (
        f"Missed: selection of {few} or {more} million elements takes more than one copy (goal {most:.1f}, "
        "where a copy moves twice the bytes)."
    )


def _elements(of: Row) -> int:
    return int(of["name"].split()[0].replace(",", ""))


def tests() -> str:
    """Return how many of the kernels' tests passed in the first run."""
    found = row("gpu/first", section="build", part="tests")
    return f"({found['passed']} of {found['passed'] + len(found['failed'])} tests passed"


def packing() -> str:
    pack, unpack = (
        goal("gpu/second", f"256,000,000: {what} int8 over a copy") for what in ("pack", "unpack")
    )
    return f"Packing int8 takes {pack:.2f} of a copy's time, unpacking {unpack:.2f}."
