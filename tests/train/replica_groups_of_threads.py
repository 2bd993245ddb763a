"""Groups of threads that train together, with a record of each life of a group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN
from hpcsgd.checkpoint import Checkpoints, Writer, restore
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import Topology, form
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.elastic_average import ElasticAverage
from hpcsgd.elastic.endings import Over
from hpcsgd.elastic.event_log import Event
from hpcsgd.report.metrics import Metrics, Record, read
from hpcsgd.train.elastic_run import ElasticLoop, living_of
from hpcsgd.train.training_setup import TrainingSetup, assemble

TRAIN = 96
WORDS = [
    *("--model.name", "train.small:steady", "--model.arguments", "{inputs=36}"),
    *[
        "--data.group_batch_size",
        "4",
        "--method.name",
        "ensemble_sync",
        "--training.epochs",
        "3",
        "--method.sync_every",
        "3",
        "--seed",
        "2",
    ],
]

NO_NORM = ["--model.arguments", "{inputs=36,norm=false}"]


class Died(Exception):
    """Raised in place of the death of a process."""


class Stops:
    """A stand-in for `Stopping` that stops at step `at` of the job."""

    def __init__(self, at: int | None = None) -> None:
        self._left = at

    def now(self) -> str | None:
        if self._left is None:
            return None
        self._left -= 1
        return self.at_once()

    def at_once(self) -> str | None:
        return "it is time" if self._left is not None and self._left < 0 else None


class Paced(ElasticAverage):
    """An average that reports a fixed time per step for one rank, however busy the machine is."""

    def __init__(self, work: float, *arguments: Any, **limits: Any) -> None:
        super().__init__(*arguments, **limits)
        self._says = work / self._group.size

    def mean(self, w: Sequence[Tensor], t: int = 0, **how: Any) -> None:
        self.report = replace(self.report, step_seconds=self._says)
        super().mean(w, t, **how)


class Clock:
    """A stand-in for the module `time`; each thread has its own time, which only the test advances."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._thread = threading.local()

    def perf_counter(self) -> float:
        return getattr(self._thread, "seconds", 0.0)

    def wait(self, seconds: float) -> None:
        self._thread.seconds = self.perf_counter() + seconds


@dataclass
class Life:
    """What a rank of a group did in one life: samples by epoch, its model at the end, how it ended."""

    seen: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0
    model: dict[str, Tensor] = field(default_factory=dict)
    reason: str | None = None
    over: bool = False
    records: list[Record] = field(default_factory=list)
    """The records of all lives so far that saved in this folder."""


@dataclass
class World:
    """A coordinator, a job file with command-line options, and a folder for checkpoints."""

    at: Coordinator
    job_file: Path
    folder: Path
    words: Sequence[str] = ()

    def live(
        self,
        replica_group: int,
        replica_groups: int,
        ranks: int = 1,
        *,
        before_step: Callable[[int], None] = lambda t: None,
        stops_at: int | None = None,
        prepare: Callable[[TrainingSetup], None] = lambda parts: None,
        work: float | None = None,
        went: list[Life] | None = None,
    ) -> list[Life]:
        """Run one life of a group, on threads.

        `before_step` may raise `Died`. `work` is the reported time in seconds of a step on one rank; by
        default it is measured. Lives that end with an exception are added to `went`.
        """

        def rank(group: Communicator) -> Life:
            where = replica_group, group, self.at.address, TOKEN, "127.0.0.1"
            limits = {
                "replica_groups": replica_groups,
                "heartbeat_timeout": HEARTBEAT_TIMEOUT,
                "timeout": 600,
            }
            elastic_average = (
                ElasticAverage(*where, **limits) if work is None else Paced(work, *where, **limits)
            )
            with ExitStack() as left:
                left.callback(elastic_average.close)
                life = Life()
                if went is not None:
                    went.append(life)
                topology = replace(form(group), replica_groups=elastic_average)
                return self._train(topology, elastic_average, life, before_step, stops_at, prepare)

        return threads.run(ranks, rank)

    def _train(
        self,
        topology: Topology,
        elastic_average: ElasticAverage,
        life: Life,
        before_step: Callable[[int], None],
        stops_at: int | None,
        prepare: Callable[[TrainingSetup], None],
    ) -> Life:
        config = load(self.job_file, [*WORDS, *self.words])
        parts = assemble(config, topology, "job.toml")
        parts.transform = lambda x, _: x
        watch(parts, life, before_step)
        prepare(parts)
        control, unit = topology.world.dup_with_thread(), config.rebalance.resource
        writer, stops = Writer(self.folder, topology), Stops(stops_at)
        loop = ElasticLoop(
            config, parts, writer, stops, control,
            elastic_average=elastic_average, reallocated=unit, living=living_of(config.lr_schedule, parts),
        )  # fmt: skip
        if (saved := Checkpoints(self.folder, topology).newest()) is not None:
            shared, _ = restore(saved, parts.optimizer)
            loop.resume_from(shared, None)
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"metrics-{elastic_average.index}-{topology.rank}.jsonl"
        with Metrics(path, resumed_step=parts.optimizer.t) as loop.metrics:
            self._live(loop, life)
            writer.finish()
        life.records = read(path)
        life.model = {name: value.clone() for name, value in parts.model.state_dict().items()}
        return life

    def _live(self, loop: ElasticLoop, life: Life) -> None:
        try:
            life.reason = loop.train()
            if life.reason is None:
                loop.elastic_average.finish()
        except Over:
            life.over = True


def watch(parts: TrainingSetup, life: Life, before_step: Callable[[int], None]) -> None:
    """Record which samples are read, and call `before_step` before each step."""
    fetch = parts.loader.dataset.__getitems__  # pyright: ignore[reportAttributeAccessIssue]

    def fetched(rows: list[int]) -> Any:
        before_step(parts.optimizer.t)
        life.seen.setdefault(parts.sampler.state_dict()["epoch"], []).extend(rows)
        life.steps += 1
        return fetch(rows)

    parts.loader.dataset.__getitems__ = fetched  # pyright: ignore[reportAttributeAccessIssue]


DECIDING = (
    "event",
    "replica_group",
    "why",
    "generation",
    "rounds",
    "members",
    "newcomers",
    "counted",
    "t",
    "epoch",
)


def course(events: Sequence[Event]) -> list[Event]:
    """Return the events that decide what is trained: losses, generations and the groups of each round."""
    return [
        {key: event[key] for key in DECIDING if key in event} for event in events if event["event"] != "units"
    ]


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Check that the floating-point values are equal; each group counts its own batches."""
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items() if value.is_floating_point())
