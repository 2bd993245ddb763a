"""Tokens per second from disk, against one read of the file and against what a model consumes.

    python benchmarks/token_reading.py [--quick] [--folder FOLDER] [--json FILE]

Dataset files of random tokens, of one byte and of two bytes each, are made in FOLDER, by default a temporary
one. Before each pass the file is evicted from the kernel's cache. "one read" is a loop of read() calls of one
megabyte. "ours" are batches of 16 windows of 1024 tokens, as tensors of int64, from the loader that a run
uses. They are read in the order of the text, and in the order of an epoch. In the second case one process
reads them, or one process on each core, as the ranks of a node do. Processes are ready before the clock
starts. Contestants take turns. What a model consumes is what one core can train on, in steps of forward pass,
backward pass and SGD.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from harness import Contestant, Goal, Run, Spread, interleaved, print_table, ratios
from hpcsgd.data import AsRank, Batches, Sampler, Windows, reading
from hpcsgd.data.corpus import Vocabulary
from hpcsgd.data.token_segments import Writer
from hpcsgd.files.hdf5 import new_file
from hpcsgd.models import gpt, lstm

READ = "one read"
OVER_READ = 1 / 0.9
"""Goal: ratio of seconds to those of one read."""
OVER_MODEL = 0.1
"""Goal: seconds to read a token over seconds to train on it."""
WINDOW, BATCH, TRAINED = 1024, 16, 4
READ_BLOCK = 1 << 20
TYPES = {"1 byte": 256, "2 bytes": 50_257}
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["hpcsgd.data"])


@dataclass
class Pass:
    """One pass over all windows of a dataset file, by `ranks` processes, which are new ones each time."""

    path: Path
    ranks: int
    shuffle: bool

    def start(self) -> None:
        self._gate = PROCESSES.Barrier(self.ranks + 1)
        shared = self.path, self.ranks, self.shuffle, self._gate
        ranks = range(self.ranks)
        self._processes = [PROCESSES.Process(target=read_windows, args=(rank, *shared)) for rank in ranks]
        for process in self._processes:
            process.start()
        self._gate.wait()  # all processes are ready

    def run(self) -> None:
        self._gate.wait()
        self._gate.wait()

    def end(self) -> None:
        for process in self._processes:
            process.join()
        evict(self.path)
        self.start()

    def abandon(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def read_windows(rank: int, path: Path, ranks: int, shuffle: bool, gate: Any) -> None:
    torch.set_num_threads(1)
    data = Windows(path, "train", WINDOW)
    loader = reading(data, Batches(Sampler(data, AsRank(rank, ranks), shuffle=shuffle), BATCH))
    gate.wait()
    gate.wait()
    for _ in loader:
        pass
    gate.wait()


def evict(path: Path) -> None:
    """Evict the file from the kernel's cache, provided that no process has it mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(READ_BLOCK):
            pass


def make(path: Path, types: int, tokens: int) -> None:
    chance = np.random.default_rng(0)
    with new_file(path) as file:
        Vocabulary("random", "words", types, 0, b"random").write(file)
        writer = Writer(file.create_group("train"), types)
        while (left := tokens - writer.tokens) > 0:
            writer.append(chance.integers(0, types, min(left, 1 << 24), np.int32))
        writer.finish()
    evict(path)


def measured(path: Path, kind: str, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    cores = len(os.sched_getaffinity(0))
    passes = {
        "ours, in order": Pass(path, 1, shuffle=False),
        "ours": Pass(path, 1, shuffle=True),
        f"ours, {cores} processes": Pass(path, cores, shuffle=True),
    }
    contestants = {READ: Contestant(lambda: read_once(path), settle=lambda: evict(path), warm_up=0)}
    for name, one in passes.items():
        one.start()
        contestants[name] = Contestant(one.run, settle=one.end, warm_up=1)
    try:
        blocks = interleaved(contestants, rounds=rounds)
    finally:
        for one in passes.values():
            one.abandon()
    for name, times in blocks.items():
        over = ratios(times.wall, blocks[READ].wall)
        yield {
            "tokens": kind, "count": tokens, "bytes": path.stat().st_size, "who": name,
            "seconds": asdict(Spread.of(times.wall)), "over_read": asdict(over),
        }  # fmt: skip


def training(model: nn.Module, types: int) -> Callable[[], None]:
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randint(types, (TRAINED, WINDOW + 1))

    def step() -> None:
        scores = model(x[:, :-1])
        cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def consumed(rounds: int) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    types = TYPES["1 byte"]
    models = {
        "GPT, 0.8 M parameters": gpt(types),
        "LSTM, 0.7 M parameters": lstm(types, embedding=200, hidden=200),
    }
    blocks = interleaved(
        {name: Contestant(training(model, types), warm_up=1) for name, model in models.items()}, rounds=rounds
    )
    for name, times in blocks.items():
        yield {"who": name, "count": TRAINED * WINDOW, "seconds": asdict(Spread.of(times.wall))}


def rate(row: dict[str, Any]) -> float:
    return row["count"] / row["seconds"]["median"]


def goals(read: list[dict[str, Any]], trained: list[dict[str, Any]]) -> list[Goal]:
    fastest = max(map(rate, trained))
    found = []
    for row in read:
        if row["who"] == READ:
            continue
        found.append(
            Goal(f"{row['tokens']}: {row['who']} over one read", row["over_read"]["median"], OVER_READ)
        )
        if row["who"] == "ours":
            found.append(
                Goal(f"{row['tokens']}: reading over training, one core", fastest / rate(row), OVER_MODEL)
            )
    return found


def cells(row: dict[str, Any]) -> list[object]:
    over = row.get("over_read")
    return [
        row.get("tokens", ""), row["who"], f"{row['seconds']['median']:.3f}", f"{rate(row) / 1e6:,.4g}",
        f"{row['bytes'] / row['seconds']['median'] / 1e6:,.0f}" if "bytes" in row else "",
        f"{over['median']:.3f} ({over['low']:.3f}–{over['high']:.3f})" if over else "",
    ]  # fmt: skip


HEAD = ["a token has", "who", "s", "million tokens/s", "MB/s", "seconds over one read (quartiles)"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second from disk, against one read of the file.")
    parser.add_argument("--quick", action="store_true", help="take a minute: smaller files, fewer rounds")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    run = Run()
    size, rounds = (1 << 27, 3) if arguments.quick else (1 << 30, 7)
    read: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for kind, types in TYPES.items():
            path, tokens = Path(folder) / "tokens.h5", size // (1 if types <= 256 else 2)
            make(path, types, tokens)
            read += measured(path, kind, tokens, rounds)
    trained = list(consumed(3 if arguments.quick else 10))
    print_table(map(cells, [*read, *trained]), HEAD)
    run.conclude([*read, *trained], goals(read, trained), arguments.json)


if __name__ == "__main__":
    main()
