"""Figures in docs/cluster.md about scaling and starts, and in benchmarks/README.md about predictions."""

from __future__ import annotations

from statistics import median

from website.measured.results import row, rows, table

LINES = {
    "`hierarchical`": "hierarchical",
    "`hierarchical`, delayed": "hierarchical, delayed",
    "`allreduce_local_sgd`": "allreduce-based",
    '`hierarchical` with `grad_reduce = "alltoall"`': "hierarchical, all-to-all",
}


def scaling() -> str:
    lines = [
        [
            name,
            *(
                row("strong_scaling", ranks=16, who=who, figure=of)["speedup"]
                for of in ("figure 9", "figure 5")
            ),
        ]
        for name, who in LINES.items()
    ]
    lines.append(["DDP", *[row("strong_scaling", ranks=16, who="DDP")["speedup"]] * 2])
    return table([name, *(f"{each:.1f}" for each in speedups)] for name, *speedups in lines)


def predictions() -> str:
    most = max(
        each["predicted_speedup"] / each["speedup"] - 1
        for each in rows("strong_scaling")
        if each["predicted_speedup"]
    )
    return f"The dashed predictions of `hpcsgd plan` are up to {100 * most:.0f} % too high"


def opens() -> str:
    usual, packed = (row("start_up", who=who) for who in ("unpacked", "packed"))
    found, missed = round(usual["opens"], -2), round(usual["others"], -3)
    return (
        f"a rank opens about {found:,.0f} files and looks for {missed:,.0f} more, each on Lustre or NFS a "
        f"message to one server. With a packed environment it opens {packed['opens']:.0f}:"
    )


def start() -> str:
    first, usual = (
        f"{median(row('start_up', who=who)['seconds']):.1f} s" for who in ("packed, first", "unpacked")
    )
    return f"the first start on a node took {first} instead of {usual}"
