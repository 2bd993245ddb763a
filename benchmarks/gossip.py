"""Gossip methods and their rivals on hosts with slow links: seconds per step, stragglers, and accuracy.

    hpcsgd data convert mnist FOLDER DATA/mnist.h5
    python benchmarks/gossip.py --data DATA [--hosts N] [--rate 10] [--json FILE] [--plot FILE]

Each host has one rank, which is a group. The model is ResNet-20 with a batch of 32 per rank. The hosts are
network namespaces, which need root. The accuracy is that of benchmarks/jobs/mnist_cnn.toml on as many ranks,
after the same number of epochs. --quick takes a minute and trains on digits.

"AR-SGD" is `bsp`, which sends 2·(n − 1)/n times the model. By recursive doubling, as in the paper, it sends
log₂ n times the model (see gossip/doubling.py), so n is a power of two.

The time of a step is that of the slowest rank. It is measured in blocks, which end when all their messages
have arrived. "link" is the number of bytes over the link's rate. No step can be shorter. If a method does not
compute while it sends, the time of computing is added.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness import Goal, Run, Spread, mpiexec, print_table, programs
from harness.hosts import on_hosts, shaped_hosts
from hpcsgd.data import convert
from hpcsgd.files.pictures import STYLE, save

METHODS = {
    "AR-SGD": 'name = "bsp"',
    "D-PSGD": 'name = "d_psgd"',
    "SGP": 'name = "sgp"',
    "2P-SGP": 'name = "sgp"\npeers = 2',
    "1-OSGP": 'name = "osgp"\noverlap_steps = 1',
    "AD-PSGD": 'name = "ad_psgd"',
    "async SGD": 'name = "async_sgd"',
    "AR/1P-SGP": 'name = "switch"\nfirst = { name = "bsp" }\nthen = { name = "sgp" }\nat = { epoch = 1 }',
}
PAPER = {"AR-SGD": 1.0, "D-PSGD": 8.5 / 4.9, "SGP": 8.5 / 3.2, "1-OSGP": 8.5 / 1.8, "AD-PSGD": 8.5 / 2.9}
"""Rates over that of AR-SGD in the SGP paper, with 16 nodes at 10 Gb/s."""
ALONE = "compute only"
NAMES = {
    "AR-SGD": "bsp", "AR-SGD by doubling": "bsp by doubling", "D-PSGD": "d_psgd", "SGP": "sgp",
    "2P-SGP": "sgp(2)", "1-OSGP": "osgp(1)", "AD-PSGD": "ad_psgd", "async SGD": "async_sgd",
}  # fmt: skip
"""The methods' names in the picture."""
HEAD = "who,late,ms/step,link,sent MB,rate over AR-SGD,over doubling,paper,rank 0 waits for"


def speed(hosts: int, rate: str, rounds: int, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(hosts, rate) as name:
        out = Path(folder) / "rows.json"
        script = Path(__file__).with_suffix("") / "rank.py"
        arguments = ["--out", str(out), "--rounds", str(rounds), "--steps", str(steps)]
        on_hosts(name, hosts, script, arguments, timeout=3600)
        return json.loads(out.read_text())


def with_limits(rows: list[dict[str, Any]], bytes_per_s: float) -> list[dict[str, Any]]:
    for row in rows:
        if "bytes_a_step" in row:
            row["link_seconds_a_step"] = row["bytes_a_step"] / bytes_per_s
    return rows


def accuracies(
    methods: Sequence[str], job: Path, store: Path, ranks: int, epochs: int, seeds: int
) -> list[dict[str, Any]]:
    """Return the accuracies after training by `hpcsgd train`, as a user would run it."""
    head, rest = job.read_text().split("[method]\n")
    table = tomllib.loads(job.read_text())
    B, lr = table["data"]["group_batch_size"], table["optimizer"]["lr"]
    rows = []
    for name in methods:
        for seed in range(1, seeds + 1):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "job.toml"
                training = rest[rest.index("[training]") :]
                file.write_text(f"{head}[method]\n{METHODS[name]}\n{training}")
                groups, more = (1, ranks) if name == "AR-SGD" else (ranks, 1)
                words = {
                    "data.path": store, "data.group_batch_size": B * more, "optimizer.lr": lr * more,
                    "parallel.groups": groups, "seed": seed, "training.epochs": epochs, "training.threads": 1,
                    "lr_schedule.arguments.T_max": epochs, "run.output_dir": f"{folder}/run",
                }  # fmt: skip
                overrides = [word for key, value in words.items() for word in (f"--{key}", str(value))]
                command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "hpcsgd", "train", str(file)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                programs.run([*command, *overrides], env=environment, timeout=3600)
                found = json.loads((Path(folder) / "run" / "summary.json").read_text())
            kept = {key: found[key] for key in ("accuracy", "distance", "mean_staleness")}
            rows.append({"who": name, "seed": seed, "epochs": epochs, **kept})
            print(f"{name}, seed {seed}: accuracy {found['accuracy']:.4f}", flush=True)
    return rows


def goals(rows: list[dict[str, Any]], trained: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals as ratios of seconds, each at most one over the paper's ratio of rates."""
    quiet = {row["who"]: row for row in rows if row["delay"] == 0}

    def over(who: str, other: str) -> float:
        return 1 / quiet[who][f"rate_over_{other}"]["median"]

    found = [
        Goal("seconds of SGP over AR-SGD", over("SGP", "AR"), 1 / 2.7),
        Goal("seconds of 1-OSGP over AR-SGD", over("1-OSGP", "AR"), 1 / 4.7),
        Goal("seconds of SGP over AR-SGD by doubling", over("SGP", "doubling"), 1 / 2.7),
        Goal("seconds of 1-OSGP over AR-SGD by doubling", over("1-OSGP", "doubling"), 1 / 4.7),
        Goal("seconds of SGP over D-PSGD", over("SGP", "D-PSGD"), 1 / 1.5),
    ]
    names = dict.fromkeys(row["who"] for row in trained)
    score = {name: mean(row["accuracy"] for row in trained if row["who"] == name) for name in names}
    for name in names:
        if name != "AR-SGD":
            behind = 100 * (score["AR-SGD"] - score[name])
            found.append(Goal(f"points of accuracy of {name} behind AR-SGD", behind, 0.5))
    return found


def cells(row: dict[str, Any]) -> list[object]:
    waits = row.get("waited_a_step", {})
    longest = sorted(((s, p) for p, s in waits.items() if s > 1e-4), reverse=True)
    sent = row.get("bytes_a_step")
    return [
        row["who"],
        f"{1e3 * row['delay']:.0f}",
        f"{1e3 * row['seconds_a_step']['median']:.1f}",
        f"{1e3 * row['link_seconds_a_step']:.1f}" if sent else "",
        f"{sent / 1e6:.2f}" if sent else "",
        Spread(**row["rate_over_AR"]),
        Spread(**row["rate_over_doubling"]),
        f"{PAPER[row['who']]:.2f}" if row["who"] in PAPER and not row["delay"] else "",
        ", ".join(f"{phase} {1e3 * s:.0f}" for s, phase in longest),
    ]


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw what a step's time is spent on, without a straggler and with one."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 4.6), layout="constrained", dpi=120)
        _draw(figure, rows)
        save(figure, path)


def _draw(figure: Figure, rows: list[dict[str, Any]]) -> None:
    delays = sorted({row["delay"] for row in rows})
    for axes, delay in zip(figure.subplots(1, len(delays), sharey=True), delays, strict=True):
        mine = [row for row in rows if row["delay"] == delay]
        names = [NAMES.get(row["who"], row["who"]) for row in mine]
        medians = [row["seconds_a_step"]["median"] for row in mine]
        apart = {True: "C0", False: "C7"}  # for torch's steps and for doubling only the total is known
        told = [row["who"] == ALONE or "waited_a_step" in row for row in mine]
        axes.barh(names, medians, color=[apart[is_reported] for is_reported in told])
        # These waits are rank 0's. If it initiates exchanges (AD-PSGD), it may wait longer than the median
        # step takes.
        waited = [
            min(sum(row.get("waited_a_step", {}).values()), row["seconds_a_step"]["median"]) for row in mine
        ]
        axes.barh(names, waited, left=[m - w for m, w in zip(medians, waited, strict=True)], color="C1")
        for place, row in enumerate(mine):
            if "link_seconds_a_step" in row:
                axes.plot([row["link_seconds_a_step"]] * 2, [place - 0.4, place + 0.4], "k-", lw=2)
        late = f"one rank {1e3 * delay:.0f} ms late in every step" if delay else "no straggler"
        axes.set(xlabel="seconds per step", title=late)
        axes.grid(visible=False, axis="y")
    figure.axes[0].invert_yaxis()
    parts = {"computing": "C0", "rank 0 waits for others": "C1", "both together": "C7"}
    handles: list[Artist] = [Patch(color=colour, label=part) for part, colour in parts.items()]
    handles.append(Line2D([], [], color="k", lw=2, label="bytes over the rate of the link"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description="Gossip methods and others on hosts with slow links.")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder with mnist.h5")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=int, default=10, help="Mbit/s of a link")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="take the accuracies of this --json FILE")
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    run = Run()
    jobs = Path(__file__).with_name("jobs")
    with tempfile.TemporaryDirectory() as folder:
        job, store, methods = jobs / "mnist_cnn.toml", given.data / "mnist.h5", list(METHODS)
        if given.quick:
            given.hosts, given.rate = 2, 100
            given.rounds, given.steps, given.epochs, given.seeds = 2, 1, 1, 1
            methods = ["AR-SGD", "SGP"]
            job, store = jobs / "digits_cnn.toml", Path(folder) / "digits.h5"
            convert("digits", None, store)
        rows = speed(given.hosts, f"{given.rate}mbit", given.rounds, given.steps)
        if given.keep:
            trained = [row for row in run.kept(given.keep) if "accuracy" in row]
        else:
            trained = accuracies(methods, job, store, given.hosts, given.epochs, given.seeds)
    rows = with_limits(rows, given.rate * 1e6 / 8)
    print_table(map(cells, rows), HEAD.split(","))
    quiet = {row["who"]: row["seconds_a_step"]["median"] for row in rows if row["delay"] == 0}
    ratio = quiet["AR-SGD"] / quiet[ALONE] - 1
    where = f"{given.hosts} hosts at {given.rate} Mbit/s"
    print(f"{where}: AR-SGD communicates {ratio:.1f} times as long as it computes")
    hosts = {"hosts": given.hosts, "link_mbit_per_s": given.rate, "communication_over_computing": ratio}
    run.conclude(rows + trained, goals(rows, trained), given.json, hosts)
    if given.plot:
        draw(given.plot, rows)


if __name__ == "__main__":
    main()
