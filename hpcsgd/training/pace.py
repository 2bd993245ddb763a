"""How gradients travel fastest here: a few steps with each choice, before the run, which has the best one.

Sums have other bits in other buckets. So the choice is written into the run's own job file, and a run that is
resumed keeps it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import Config
from hpcsgd.core.topology import Job
from hpcsgd.errors import UserError, located
from hpcsgd.report.run_folder import JOB_FILE
from hpcsgd.training.assembly import Assembly, assemble
from hpcsgd.training.loading import batch_of_rank
from hpcsgd.transport import PeerLost
from hpcsgd.transport.streams import on_accelerator, settle

log = logging.getLogger(__name__)

BUCKETS_MB = (1.0, 4.0, 25.0)


@dataclass(frozen=True)
class Sending:
    """Buckets of so many megabytes, and whether they leave during the backward pass."""

    bucket_mb: float
    overlap: bool

    def within(self, config: Config) -> Config:
        training = replace(config.training, bucket_mb=self.bucket_mb, overlap=self.overlap, tune=None)
        return replace(config, training=training)

    def __str__(self) -> str:
        return f"bucket_mb = {self.bucket_mb:g}, overlap = {'true' if self.overlap else 'false'}"


def tuned(config: Config, job: Job, source: str, resume: bool) -> Config:
    """`config`, read from `source`, with what made steps fastest where it asks for that; collective."""
    if config.training.tune is None:
        return config
    with job.together("choosing buckets"), located(f"{source}: [training] tune"):
        if job.has_peers:
            raise UserError(
                "groups that `hpcsgd launch` starts are not tried out: give bucket_mb and overlap"
            )
        kept = of_the_run(config.run.folder) if resume and job.rank == 0 else None
    kept = job.world.gather_objects(kept)[0]
    if kept is None:
        kept = fastest(config, job, source, config.training.tune)
    return kept.within(config)


def of_the_run(folder: Path) -> Sending | None:
    """What was chosen when it began."""
    file = folder / JOB_FILE
    told = read_toml(file)["training"] if file.exists() else {}
    return Sending(told["bucket_mb"], told["overlap"]) if {"bucket_mb", "overlap"} <= told.keys() else None


def fastest(config: Config, job: Job, source: str, steps: int) -> Sending:
    """Of all choices that `config` leaves open; collective."""
    sizes = BUCKETS_MB if config.training.bucket_mb is None else (config.training.bucket_mb,)
    overlap = config.training.overlap
    found: dict[Sending, float] = {}
    for size in sizes:
        sending = Sending(size, overlap is not False)
        found[sending] = _seconds(sending.within(config), job, source, steps)
    best = min(found, key=lambda sending: found[sending])
    if overlap is None:
        after = Sending(best.bucket_mb, overlap=False)
        found[after] = _seconds(after.within(config), job, source, steps)
        best = min(best, after, key=lambda sending: found[sending])
    for sending, seconds in found.items():
        log.info("%.4g s a step with %s%s", seconds, sending, ": taken" if sending == best else "")
    return best


def _seconds(config: Config, job: Job, source: str, steps: int) -> float:
    """A step takes, of the slowest rank, after a first one. Nothing is left of it."""
    parts = assemble(config, job, source)
    taken = torch.tensor(
        median(list(_times(parts, config, steps + 1))[1:]), dtype=torch.float64, device="cpu"
    )
    job.world.allreduce(taken, "max").wait()
    parts.optimizer.state_dict()  # what is under way arrives
    if not job.world.end_apart(config.job.timeout):
        raise PeerLost(f"communication in flight {config.job.timeout:g} s after steps to choose buckets by")
    del parts
    gc.collect()  # models are in cycles with their optimizers
    return taken.item()


def _times(parts: Assembly, config: Config, steps: int) -> Iterator[float]:
    rows = range(min(batch_of_rank(config.data.batch_size, parts.optimizer.job.K), len(parts.train)))
    x, y = parts.vary(*parts.train.collate(parts.train.__getitems__(list(rows))))
    for _ in range(steps):
        parts.optimizer.job.world.barrier()
        start = time.perf_counter()
        parts.optimizer.zero_grad()
        with parts.precision.computing():
            loss = parts.task.loss(parts.model(x), y)
        parts.precision.backward(loss)
        parts.precision.step(parts.optimizer, loss=loss)
        if on_accelerator(parts.device):
            settle(parts.device)
        yield time.perf_counter() - start
