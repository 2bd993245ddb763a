"""Files that a run writes, kept small, and the commands that read them, called in this process."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.config.variants import configs
from hpcsgd.core.topology import form
from hpcsgd.elastic.event_log import NAME, EventLog
from hpcsgd.errors import JobError, UserError, in_one_line
from hpcsgd.performance import comparing
from hpcsgd.train.probe_answer import setting
from performance.planning.plans import MACHINE
from soak.job_files import Told, short_of_memory
from soak.job_files import told as typed
from soak.test_checkpoints import cut_off, flipped, overwritten, prolonged
from train.launches import JOB, make_store

JOB_OF_TWO = JOB.replace("[data]", "[parallel]\ngroups = 2\n[data]")
NEVER: Any = SimpleNamespace(now=lambda: 0)
"""A stand-in for `Reasons`, which handles signals and therefore works only in the main thread."""
METHODS = "bsp, hierarchical sync_every=2"
Damage = Callable[[bytes, random.Random], bytes]
DAMAGES: tuple[Damage, ...] = (
    cut_off, flipped, flipped, flipped, overwritten, prolonged, lambda *_: b"",
    lambda *_: b"[" * 100_000, lambda *_: b"[]", lambda *_: b"{}", lambda *_: b"null",
)  # fmt: skip
A_FOLDER = "a folder"


def train(*words: str) -> None:
    config = load(Path("job.toml"), ["--run.trace_steps", "2-3", *words])
    run: Any = importlib.import_module("hpcsgd.train.run")  # the package has a function of this name
    threads.run(2, lambda world: run.train(config, form(world, 2), "job.toml", NEVER, True))


def compare() -> None:
    def rank(world: Communicator) -> None:
        comparing.compare(world, Path("job.toml"), configs(Path("job.toml"), (), METHODS), NEVER, resume=True)

    threads.run(2, rank)


def with_probe() -> None:
    from hpcsgd.train.probe_answer import take_answer

    take_answer(load(Path("job.toml")), Path("probe.json"), 2)


def ended(call: Callable[[], None]) -> Told:
    """Return how one of these functions ends, with the message that the command would print."""
    with short_of_memory():
        try:
            call()
        except (JobError, UserError) as error:
            message = error if isinstance(error, JobError) else in_one_line(error)
            return Told([call.__name__], 1, f"hpcsgd: {message}\n")
        except BaseException:  # noqa: BLE001 - no exception may escape
            return Told([call.__name__], 1, "", traceback.format_exc())
    return Told([call.__name__], 0, "")


def command(words: str) -> Callable[[], Told]:
    return lambda: typed(words.split())


PLAN = "plan job.toml --machine machine.toml --probe probe.json --runs run --samples 48"
READERS: dict[str, tuple[Callable[[], Told], ...]] = {
    "run/": (
        lambda: ended(train),
        lambda: ended(lambda: train("--training.epochs", "3")),
        command("report run --to page.html"),
        command("export run --to out.safetensors"),
        command(PLAN),
    ),
    "runs/job-compare/": (lambda: ended(compare), command("report runs/job-compare --to page.html")),
    "groups-run/": (command("report groups-run --to page.html"),),
    "small.h5": (lambda: ended(train), command("job train job.toml --ranks-per-node 2 --run.output_dir new")),
    "machine.toml": (command(PLAN),),
    "probe.json": (command(PLAN), lambda: ended(with_probe)),
    "plan.json": (command("job train planned.toml --plan plan.json --run.output_dir new"),),
}
"""The commands that read a file, by the beginning of the file's path."""
NOT_READ = {".png", ".html", ".csv"}


def prepared(folder: Path) -> None:
    """Write the files of runs into `folder`, which must be the working directory."""
    make_store(folder / "small.h5")
    (folder / "job.toml").write_text(f'{JOB_OF_TWO}[run]\noutput_dir = "run"\n')
    train()
    (folder / "job.toml").write_text(JOB_OF_TWO)
    compare()
    (folder / "job.toml").write_text(f'{JOB_OF_TWO}[run]\noutput_dir = "run"\n')
    (folder / "machine.toml").write_text(MACHINE)
    shutil.copytree("run", "groups-run", ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    for replica_group in range(2):
        shutil.copytree(
            "run", f"groups-run/replica_groups/{replica_group}", ignore=shutil.ignore_patterns("checkpoints")
        )
    with EventLog(Path("groups-run", NAME)) as events:
        events.started(replica_group=0, life="1", ranks=1)
        events.started(replica_group=1, life="1", ranks=1)
        events.generation(generation=1, members=[0, 1], newcomers=[], rounds=0)
        events.units(unit="threads", units={0: 1, 1: 2})
        events.commit(generation=1, rounds=1, members=[0, 1], counted=[0, 1], t=2, epoch=0, fraction=0.5)
        events.lost(replica_group=1, why="it said nothing", kind="silent")  # pyright: ignore[reportArgumentType]
        events.ended(replica_group=1, life="1", code=-9)
        events.finished()
    probe = {"P": 2, "unclear": None, "setting": setting(load(Path("job.toml"))), "rows": []}
    (folder / "probe.json").write_text(json.dumps(probe))
    shutil.copy("job.toml", "planned.toml")
    told = typed([*PLAN.replace("job.toml", "planned.toml").split(), "--write"])
    assert told.code == 0, told
    shutil.copy(next(folder.rglob("plan.json")), folder / "plan.json")


@dataclass(frozen=True)
class Case:
    """One damaged file and a command that reads it, both drawn by a seed."""

    file: str
    content: bytes | str
    reader: Callable[[], Told]

    @classmethod
    def drawn(cls, seed: int, files: list[str]) -> Case:
        chance = random.Random(f"run file {seed}")
        where = chance.choice(list(READERS))
        file = chance.choice([file for file in files if file.startswith(where)])
        before = Path(file).read_bytes()
        damaged = A_FOLDER if chance.random() < 0.1 else chance.choice(DAMAGES)(before or b" ", chance)
        return cls(file, damaged, chance.choice(READERS[where]))

    def put(self) -> None:
        path = Path(self.file)
        if isinstance(self.content, str):
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(self.content)
