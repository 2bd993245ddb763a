"""Figures in benchmarks/README.md about DEFT's speed and its bins."""

from __future__ import annotations

from website.measured.results import from_to, goal, result, row, rows

TODAYS, MEASURED = "size·log k", "measured"
"""The names in deft_bins.json of the division into bins that DEFT has, and of the one by measured seconds."""


def scaling() -> str:
    def speed_up(select: str, n: int, *tasks: str) -> list[float]:
        found = rows("deft_scaling", select=select, n=n)
        return [each["speed_up"] for each in found if not tasks or each["task"] in tasks]

    (two,), (most,) = speed_up("torch.topk", 2, "NeuMF"), speed_up("torch.topk", 32, "NeuMF")
    resnet = row("deft_scaling", task="ResNet-18", select="torch.topk", n=16)
    seconds = (
        f"{1e3 * resnet['topk_seconds']:.0f} ms become {1e3 * resnet['deft_seconds']:.1f} with 16 workers"
    )
    (of_32,) = {f"{each:.0f}" for each in speed_up("kernel", 32)}
    (call,) = {f"{1e3 * each['call_seconds']:.1f}" for each in rows("deft_bins")}
    return (
        f"({seconds}), and {two:.1f} and {most:.0f} times with 2 and 32 workers on NeuMF. With our kernel "
        f"the speed-up is {from_to(speed_up('kernel', 16))} with 16 workers and {of_32} with 32 (goal "
        f"linear, missed), because one call takes {call} ms on cold caches."
    )


def planning() -> str:
    shares = [
        100 * each["value"]
        for each in result("deft_scaling")["goals"]
        if each["name"].endswith("kernel, n = 16: planning over selection")
    ]
    return (
        f"Assigning k and layers takes {from_to(shares)} % of the selection by our kernel (goal 5 %, missed)."
    )


def measured_bins() -> str:
    def seconds(bins: str) -> list[float]:
        return [each["seconds"] for each in rows("deft_bins", bins=bins)]

    won = max(today - by_time for today, by_time in zip(seconds(TODAYS), seconds(MEASURED), strict=True))
    return f"Bins by measured seconds win at most {1e3 * won:.1f} ms"


def by_label() -> str:
    behind = goal("density_by_label", "points of accuracy of DEFT behind dense")
    return f"With one label per worker it is {behind:.1f} points behind dense gradients (goal 0.5, missed)."
