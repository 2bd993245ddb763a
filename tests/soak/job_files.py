"""Small variants of the job files of examples/, and commands that read them.

The dataset files are small enough for a thousand cases. The commands are called in this process.
"""

from __future__ import annotations

import contextlib
import io
import random
import resource
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w

from data.originals import ratings, write_movielens, write_wikitext
from data.pictures import write_classes, write_pngs
from hpcsgd.cli import main
from hpcsgd.config.overrides import overlay, plain
from hpcsgd.data import convert, convert_images, convert_npz, convert_pairs, convert_text
from soak.mutations import mutated, typed

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "digits": "",
    "cifar10_resnet20": "--data.group_batch_size 8",
    "gpt_wikitext2": "--model.arguments {types=256,width=8,layers=1,heads=2} --data.arguments.bptt 16 "
    "--data.group_batch_size 4",
    "images_resnet10": "--model.arguments.classes 2 --data.group_batch_size 4",
    "movielens_ncf": "--model.arguments {users=40,items=120,factors=4,hidden=[8,4]} "
    "--data.group_batch_size 32",
    "pairs_edsr": "--model.arguments {scale=2,blocks=1,width=8,residual=1.0} "
    "--data.arguments {patch=6,patches=4}",
    "wikitext2_lstm": "--model.arguments {types=14,embedding=8,hidden=8} --data.arguments.bptt 7 "
    "--data.group_batch_size 4",
}
"""The job files of examples/, with the overrides that make each small."""
SIMULATION = "--job.groups 4 --job.steps 20 --failures.work_hours 1"
COMMANDS = ("job train", "job train", "job train", "job probe", "job measure", "job ensemble", "cite")
RANKS = ["--ranks-per-node", "4"]
ROOM = 1 << 30
"""Bytes that a command may allocate in addition to what this process already uses."""


@dataclass(frozen=True)
class Told:
    """The output of a command, and how it ended."""

    words: list[str]
    code: int
    err: str
    trace: str = ""
    """The traceback of an exception that the command did not handle."""

    def require_one_line(self) -> None:
        """Assert that the command succeeded, or failed with exactly one line on stderr and no traceback."""
        assert not self.trace, f"{' '.join(self.words)!r} ends in\n{self.trace}"
        assert self.code in (0, 1), self
        if self.code:
            assert self.err.startswith("hpcsgd: "), self
            assert self.err.count("\n") == 1, self
            assert self.err.endswith("\n"), self


def prepared(folder: Path) -> dict[str, str]:
    """Write small dataset files into `folder`, and return the text of each valid job file by its name."""
    chance = np.random.default_rng(0)
    convert("digits", None, folder / "digits.h5")
    arrays = {"x": chance.integers(0, 256, (100, 3, 32, 32), np.uint8), "y": np.arange(100) % 10}
    np.savez(folder / "cifar.npz", **arrays)
    convert_npz([folder / "cifar.npz"], folder / "cifar10.h5")
    convert_images(write_classes(folder / "pictures", each=12), folder / "shapes.h5", 32)
    convert("movielens", write_movielens(folder / "ml", ratings(40, 120, each=18)), folder / "ml-100k.h5")
    sizes = {"train": [(24, 31), (27, 24), (40, 30), (28, 28), (24, 24), (30, 25)], "val": 4 * [(20, 26)]}
    convert_pairs(write_pngs(folder / "pngs", sizes), folder / "scenes.h5", 2)
    convert("wikitext", write_wikitext(folder / "words"), folder / "wikitext2.h5")
    texts = sorted((folder / "words").glob("*"))
    convert_text(texts, folder / "wikitext2_bytes.h5", "bytes", test=(texts[0],))
    return {name: smaller(name, words) for name, words in EXAMPLES.items()}


def smaller(name: str, words: str) -> str:
    tables = tomllib.loads((ROOT / "examples" / f"{name}.toml").read_text())
    overlay(tables, words.split())
    return tomli_w.dumps(plain(tables))


@contextlib.contextmanager
def short_of_memory() -> Iterator[None]:
    """Limit the address space, as on a machine with little more memory than is in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def at_once_to(err: io.StringIO) -> Iterator[None]:
    """Redirect also what is written to `sys.__stderr__` while stderr is redirected."""
    before, sys.__stderr__ = sys.__stderr__, err  # pyright: ignore[reportConstantRedefinition]
    try:
        yield
    finally:
        sys.__stderr__ = before  # pyright: ignore[reportConstantRedefinition]


def told(words: list[str], call: Callable[[list[str]], None] = main) -> Told:
    """Return the result of these arguments to `hpcsgd`."""
    code, trace, out, err = 0, "", io.StringIO(), io.StringIO()
    with short_of_memory(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), at_once_to(err):
        try:
            call(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            err.write(end.code if isinstance(end.code, str) else "")
        except BaseException:  # noqa: BLE001 - no exception may escape
            trace = traceback.format_exc()
    return Told(words, code, err.getvalue(), trace)


@dataclass(frozen=True)
class Case:
    """One job file and one command, drawn by a seed."""

    text: bytes
    words: list[str]

    @classmethod
    def drawn(cls, seed: int, texts: dict[str, str]) -> Case:
        chance = random.Random(f"job file {seed}")
        command = "simulate" if chance.random() < 0.1 else chance.choice(COMMANDS)
        text = chance.choice(list(texts.values()))
        text = smaller("simulation", SIMULATION) if command == "simulate" else typed_for(command, text)
        return cls(mutated(text, chance), [*cls.words_of(command), *typed(text, chance)])

    @staticmethod
    def words_of(command: str) -> list[str]:
        return [*command.split(), "job.toml", *(RANKS if command.startswith("job") else [])]


def typed_for(command: str, text: str) -> str:
    """Return the job file, changed if necessary, so that the command accepts it."""
    if command != "job ensemble":
        return text
    tables = tomllib.loads(text)
    tables["method"] = {"name": "ensemble_sync", "sync_every": 4}
    return tomli_w.dumps(tables)
