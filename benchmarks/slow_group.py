"""The time in which asynchronous methods reach the loss of DiLoCo if one of four groups is four times slower.

    hpcsgd data convert text wikitext-2/wiki.train.tokens wikitext2_bytes.h5 --tokenizer bytes \\
      --test wikitext-2/wiki.test.tokens
    python benchmarks/slow_group.py --data wikitext2_bytes.h5 [--json FILE]

Four ranks, each of them a group, train a GPT of 0.12 million parameters on WikiText-2. A step of three groups
takes 20 ms and one of the fourth takes 80 ms: a step computes, and then sleeps for the rest of this time. The
contestants are

- DiLoCo, whose groups wait for the slow one at each synchronization,
- asynchronous DiLoCo with dynamic local steps, and
- HeLoCo with dynamic local steps.

DiLoCo trains 1,024 steps. The others are given 0.25, 0.35 and 0.44 of its time. Each contestant tries four
settings on a seed of its own, judged by text that is held out of training, and then trains with the best of
them on three other seeds, judged by the beginning of the test split.

The benchmark takes half an hour on two cores of a machine that runs nothing else. A step that took longer
than it should is counted as late. --who and --seeds select parts of it, and --keep FILE continues where an
earlier --json FILE ended. --quick trains a model that is too small; it takes seconds and only shows that the
benchmark runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from harness import Run, on_ranks, print_table
from slow_group.contestants import CONTESTANTS, GROUPS, Training
from slow_group.judging import finals, is_done, judged, trials

SEEDS = (1, 2, 3)
HEAD = ["who", "seeds", "time over DiLoCo's", "loss over DiLoCo's", "steps of the groups", "late", "settings"]
TIMEOUT = 3600.0


def main() -> None:
    everybody = list(CONTESTANTS)
    parser = argparse.ArgumentParser(description="Time to the loss of DiLoCo where one group is slow.")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="wikitext2_bytes.h5")
    parser.add_argument("--who", nargs="+", choices=everybody, default=everybody, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="check within seconds that it runs")
    parser.add_argument(
        "--keep", type=Path, nargs="+", metavar="FILE", default=[], help="earlier --json files"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    run = Run()
    rows = [row for file in given.keep for row in run.kept(file) if row["quick"] == given.quick]
    for who in given.who:
        train(given, islice(trials(who), 1 if given.quick else None), rows, run)
        train(given, finals(who, given.seeds[:1] if given.quick else given.seeds, rows), rows, run)
    lines, goals = judged(rows)
    print_table(lines, HEAD)
    run.conclude(rows, goals, given.json)


def train(
    given: argparse.Namespace, wanted: Iterable[Training], rows: list[dict[str, Any]], run: Run
) -> None:
    """Add the rows of the `wanted` trainings that are not there yet. One job of ranks makes them all."""
    due = [asdict(training) for training in wanted if not is_done(training, rows)]
    if not due:
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = ["--data", str(given.data.resolve()), "--trainings", json.dumps(due), "--out", str(out)]
        script = Path(__file__).with_suffix("") / "rank.py"
        on_ranks(GROUPS, script, [*options, *(["--quick"] if given.quick else [])], TIMEOUT)
        rows += json.loads(out.read_text())
    if given.json:
        run.write(given.json, rows)


if __name__ == "__main__":
    main()
