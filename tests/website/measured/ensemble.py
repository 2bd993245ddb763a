"""Figures in docs/ensemble.md about speed, accuracy and goodput, and in benchmarks/README.md about faults."""

from __future__ import annotations

from statistics import mean

from website.measured.results import goal, over, result, row, rows, table

CONTESTANTS = {
    "`bsp`": "sync SGD",
    "`async_sgd`": "async SGD",
    "`ensemble_sync`": "EnsembleSync",
    "`ensemble_sync` with natural gradient": "with natural gradient",
}
SURVIVORS = ("elastic groups", "torchft LocalSGD", "one job", "DDP")
MTBF_S = (10.0, 25.0)


def faults() -> str:
    of = {each["fault"]: each for each in rows("ensemble_faults") if "fault" in each}
    most = max(each["max_s"] for each in of.values())
    return (
        f"The next average came {of['kill']['median_s']:.2f} s after a group was killed and "
        f"{of['cut']['median_s']:.2f} s after it was cut off (medians), at most {most:.2f} s."
    )


def runs() -> str:
    (count,) = (each["runs"] for each in rows("ensemble_faults") if "runs" in each)
    assert goal("ensemble_faults", "runs of which anything was wrong") == 0
    return f"In {count} runs, four groups had one to three random faults each"


def slow_groups() -> str:
    percent = 100 * goal("ensemble_reallocation", "median of settled epochs")
    return f"an epoch takes {percent:.0f} % longer than with the best division (median)."


def speed() -> str:
    lines = []
    for name, who in CONTESTANTS.items():
        timed, trained = row("ensemble_speed", who=who, rounds=6), row("ensemble_speed", who=who, seed=1)
        times, accuracy = timed["speed_over_sync"]["median"], 100 * trained["accuracy"][-1]
        milliseconds = f"{1e3 * timed['seconds_a_step']['median']:.1f}"
        lines.append([name, milliseconds, over(times), f"{accuracy:.1f}"])
    return table(lines)


def sending() -> str:
    setting = result("ensemble_speed")["machine"]
    times = setting["move_s"] / setting["compute_s"]
    return f"Sending a gradient takes {times:.1f} times as long as computing it"


def link() -> str:
    rate = result("ensemble_speed")["machine"]["rate_bit_per_s"]
    return f"{rate / 1e6:.2f} Mbit/s, 2 groups"


def after_the_same_steps() -> str:
    halves, bsp = (
        mean(100 * each["accuracy"][-1] for each in rows("ensemble_shares", who=who))
        for who in ("EnsembleSync, halves", "sync SGD")
    )
    return f"`ensemble_sync` reaches {halves:.2f} % and `bsp` {bsp:.2f} % (three seeds)"


def window() -> str:
    first, *others = (each["setting"] for each in rows("goodput", part="measured"))
    assert (first["P"], first["K"], others) == (8, 1, [first] * len(others))
    return f"Eight groups of one rank ran for {first['window']:.0f} seconds with real kills;"


def goodput() -> str:
    lines = []
    for mtbf in MTBF_S:
        of = {each["who"]: each for each in rows("goodput", part="measured", mtbf_s=mtbf)}
        (failures,) = {each["failures"] for each in of.values()}
        lines.append([failures, *(f"{100 * of[who]['goodput']:.0f} %" for who in SURVIVORS)])
    return table(lines)


def at_scale() -> str:
    each = row("goodput", part="by nodes", nodes=1000, node_mtbf="a month")
    return (
        "In a simulation of 1,000 nodes, each a group that fails once a month, goodput is "
        f"{100 * each['elastic groups']:.1f} %, against {100 * each['one job']:.1f} % for one job."
    )
