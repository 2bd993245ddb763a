"""The quality that a language model reaches, against the bytes that a rank sends for it.

    hpcsgd data convert text wikitext-2/wiki.train.tokens wikitext2_bytes.h5 --tokenizer bytes \\
      --test wikitext-2/wiki.test.tokens
    python benchmarks/bytes_at_quality.py --data wikitext2_bytes.h5 [--json FILE] [--plot FILE]

A GPT of 0.12 million parameters trains on 4.2 million bytes of WikiText-2. P = 4 or 8 groups of one rank
share batches of 8 windows of 128 bytes. The contestants are

- bsp,
- DiLoCo, which synchronizes every 64 steps,
- Streaming DiLoCo with 4 bits,
- SparseLoCo, which synchronizes every 6·P steps,
- MuLoCo with 4 bits,
- Pier,
- DiLoCo, Streaming DiLoCo and SparseLoCo with an outer schedule, and
- the first two of these with a synchronization every 16 steps.

All of them train on the same tokens in the same order. Each is tried with four settings, on a seed of its
own, and judged by text that is held out of training. With the best setting it trains on three other seeds,
and is judged by the beginning of the test split. bsp gives the same training with any number of groups, so it
is tried with the fewest groups only.

Groups are threads of one process. --real compares a short training of every contestant with one on four ranks
(mpiexec -n 4 python benchmarks/bytes_at_quality.py --data FILE --real). The benchmark takes hours on two
cores. --who, --groups and --seeds select parts of it. --json FILE is written after every training, and --keep
FILE continues from such a file. --quick trains a model that is too small; it takes seconds and only shows
that the benchmark runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import hpcsgd
from bytes_at_quality.contestants import CONTESTANTS
from bytes_at_quality.judging import due, is_of_now, judged, name, named
from bytes_at_quality.picture import draw
from bytes_at_quality.real import compare
from bytes_at_quality.training import FULL, QUICK, measure, read
from harness import Run, print_table

Row = dict[str, Any]
SEEDS = (1, 2, 3)
HEAD = [
    "groups",
    "who",
    "seeds",
    "bits per byte",
    "loss over bsp's",
    "MB per rank",
    "times fewer",
    "settings",
]


def main() -> None:
    everybody = list(CONTESTANTS)
    parser = argparse.ArgumentParser(description="Quality of a model against the bytes sent for it.")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="wikitext2_bytes.h5")
    parser.add_argument("--who", nargs="+", choices=everybody, default=everybody, metavar="NAME")
    parser.add_argument("--groups", nargs="+", type=int, default=(4, 8))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--real", action="store_true", help="compare some steps with threads (mpiexec -n 4)")
    parser.add_argument("--quick", action="store_true", help="check within seconds that it runs")
    parser.add_argument(
        "--keep", type=Path, nargs="+", metavar="FILE", default=[], help="earlier --json files"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.real:
        compare(hpcsgd.init(groups=1).world, given.data)
        return
    setting = QUICK if given.quick else FULL
    text, run = read(given.data, setting), Run(timed=False)
    kept = (row for file in given.keep for row in run.kept(file) if is_of_now(row, setting))
    rows = list({named(row): row for row in kept}.values())  # a file may have rows of another one
    there = {named(row) for row in rows}
    seeds, shapes = (given.seeds[:1], given.groups[:1]) if given.quick else (given.seeds, given.groups)
    for who in given.who:
        for groups, seed, settings in due(rows, who, shapes, seeds, setting.trials):
            if name(groups, who, seed, settings) not in there:
                row = measure(setting, text, who, groups, settings, seed)
                found = f"{row['held_out_loss']:.4f} in {row['seconds']:.0f} s"
                print(f"{groups} groups, {who}, seed {seed}, {dict(settings)}: {found}", flush=True)
                rows.append(row)
                if given.json:
                    run.write(given.json, rows)
    order = list(CONTESTANTS)
    rows.sort(key=lambda row: (row["groups"], order.index(row["who"]), row["seed"]))
    lines, goals = judged(rows)
    print_table(lines, HEAD)
    if given.plot:
        draw(given.plot, rows)
    run.conclude(rows, goals, given.json)


if __name__ == "__main__":
    main()
