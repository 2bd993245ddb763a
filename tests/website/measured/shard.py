"""Figures in docs/shard.md about time, and in benchmarks/README.md about the load meanwhile."""

from __future__ import annotations

from statistics import median

from website.measured.results import Row, result, row, table

LINKS = {"shared memory": "shared memory", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}


def speed() -> str:
    lines = []
    for name, rate in LINKS.items():
        of = {
            who: row("sharded", who=who, rate=rate, P=4, K=2)
            for who in ("torch HSDP", "bsp", "hierarchical(8)")
        }
        seconds = {who: f"{median(each['seconds']):.3f}" for who, each in of.items()}
        cells = [name, seconds["torch HSDP"]]
        for who in ("bsp", "hierarchical(8)"):
            cells += [seconds[who], f"{of[who]['ratio']['median']:.2f}"]
        lines.append(cells)
    return table(lines)


def load() -> str:
    """Return the load of others while each link was measured; a kept result has the links before it."""
    fast = result("sharded")
    (slow,) = fast["kept"]
    (none,) = slow["kept"]
    shared, fastest, slowest = (f"{_without_us(each):.2f}" for each in (none, fast, slow))
    return (
        f"The load of others was {shared} with shared memory (which counts as disturbed), {fastest} at "
        f"1 Gbit/s and {slowest} at 100 Mbit/s."
    )


def _without_us(run: Row) -> float:
    return run["load"]["without_us"]


def unexplained() -> str:
    ratio = row("sharded", who="bsp, after backward", rate="1gbit", P=4)["ratio"]["median"]
    return f"Where the {100 * (1 - ratio):.0f} % come from was not examined."
