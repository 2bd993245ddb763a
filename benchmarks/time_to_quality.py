"""Compare how good a model is after a time and a number of bytes, for hpcsgd and rivals.

The benchmark needs root and iproute2.

    hpcsgd data convert text wikitext-2/wiki.train.tokens DATA/wikitext2_bytes.h5 --tokenizer bytes \\
      --test wikitext-2/wiki.test.tokens
    hpcsgd data convert cifar10 cifar-10-binary.tar.xz DATA/cifar10.h5
    python benchmarks/time_to_quality.py --data DATA [--json FILE] [--plot FILE]

Eight ranks really train; no computing is emulated. They run on four hosts of two ranks, whose links are
shaped to 100 Mbit/s or 1 Gbit/s, and on one host without links ("unshaped"). One task is a GPT of 1.4 million
parameters on the bytes of WikiText-2. The other is ResNet-20 on the images of CIFAR-10 at half size. All
contestants have the same samples in the same order, the same inner optimizer and the same learning-rate
schedule.

Tuning is the same for all contestants. Each trains once with each of three learning rates, on the unshaped
host and with a seed that is used only for tuning. Then it trains at its best rate with three other seeds. If
it ends behind DDP, it trains again with 1.5 times as many steps, and if necessary with 2 times.

The target is DDP's mean score plus the standard deviation over the seeds. Between two points, scores are
interpolated linearly. The time to quality is the time at which the score first reaches the target.

A score is that of the mean of all ranks' models. Ranks copy their models at twelve points. The copies are
averaged and scored after the training, so this does not count in its time.

The benchmark takes many hours on two cores. --tasks, --rates, --who and --seeds select a part of it. --json
FILE is written after every launch, and --keep FILE continues from such a file. --rates without a value only
tunes; then other programs may run on the machine, because only scores count. --quick takes a minute and
trains a model that is too small. It tests that the benchmark works, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness import Run, on_ranks, print_table
from harness.hosts import on_hosts, shaped_hosts
from time_to_quality import judging
from time_to_quality.contestants import CONTESTANTS
from time_to_quality.picture import draw
from time_to_quality.tasks import QUICK, TASKS, Task

HOSTS, RANKS_PER_HOST = 4, 2
RATES = ("100mbit", "1gbit", judging.UNSHAPED)
SEEDS = (1, 2, 3)
TIMEOUT = 6 * 3600.0
"""Seconds for one launch."""
SCRIPT = Path(__file__).with_suffix("") / "rank.py"
Row = dict[str, Any]


def trained(task: str, rate: str, due: Sequence[Row], data: Path) -> Iterable[Row]:
    """Return the rows of these trainings, by one launch."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows"
        words = ["--out", str(out), "--data", str(data), "--task", task, "--groups", str(HOSTS)]
        words += ["--trainings", json.dumps(due)]
        if rate == judging.UNSHAPED:
            on_ranks(HOSTS * RANKS_PER_HOST, SCRIPT, words, TIMEOUT)
        else:
            with shaped_hosts(HOSTS, rate) as name:
                on_hosts(name, HOSTS, SCRIPT, words, TIMEOUT, RANKS_PER_HOST)
        return [{"task": task, "rate": rate, **json.loads(line)} for line in out.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="How good a model is after so many seconds and bytes.")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with cifar10.h5 and wikitext2_bytes.h5")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rates", nargs="*", choices=RATES, default=RATES)
    parser.add_argument(
        "--who", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="test in a minute that it works")
    parser.add_argument("--keep", type=Path, nargs="+", metavar="FILE", default=[], help="earlier results")
    parser.add_argument(
        "--trials", type=Path, nargs="+", metavar="FILE", default=[],
        help="earlier --json files of which only the trials are used, so that their times do not count",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.data is None and not given.quick:
        parser.error("--data FOLDER is missing")
    known: dict[str, Task] = QUICK if given.quick else TASKS
    tasks = list(QUICK) if given.quick else given.tasks
    part = judging.Part(given.who, given.rates, given.seeds)
    if given.quick:
        part = judging.Part(given.who, ["1gbit"], given.seeds[:1], lengths=[1.0])
    run = Run(timed=bool(part.rates))
    rows = [row for file in given.keep for row in run.kept(file)]
    rows += [
        row
        for file in given.trials
        for row in run.kept(file, timed=False)
        if row["seed"] == judging.TUNING and row not in rows
    ]
    for task in tasks:
        for rate, due in judging.launches(known[task], task, rows, part):
            rows += trained(task, rate, due, given.data or Path())
            if given.json:
                run.write(given.json, rows)
    print_table(judging.lines(rows), judging.HEAD)
    if given.plot:
        draw(given.plot, rows, TASKS | QUICK)
    run.conclude(rows, judging.goals(rows), given.json)


if __name__ == "__main__":
    main()
