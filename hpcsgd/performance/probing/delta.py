"""``hpcsgd probe --delta``: how often SelSync would synchronize with each δ, for a job file."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from hpcsgd.config.schema import Config
from hpcsgd.core.topology import Topology, raise_on_all_ranks
from hpcsgd.errors import JobError, UserError, count_text, in_file, in_section
from hpcsgd.files.atomic import replacing
from hpcsgd.methods import METHODS
from hpcsgd.named import annotations_of, resolve
from hpcsgd.performance.probing.changes import Changes, changes_of, plot, table, to_json
from hpcsgd.train.devices import form_job
from hpcsgd.train.parts import make_method
from hpcsgd.train.probe_answer import setting
from hpcsgd.train.process import compute_alike, join_world, keep_freed_memory, use_threads
from hpcsgd.train.training_setup import TrainingSetup, assemble


def run(path: Path, read: Callable[[], Config], steps: int) -> None:
    """Train steps that all synchronize, and print how many of them each δ would have left local.

    Every rank calls this. `read` reads the job file at `path`. Rank 0 writes ``delta.json`` and
    ``delta.png``.
    """
    world, config = join_world(read)
    with raise_on_all_ranks(world, "preparing to probe"):
        if steps < 2:
            raise UserError(f"--steps {steps}: at least 2 are needed, the first one has no Δ")
        config = synchronizing_always(config, path)
    world.timeout = config.parallel.timeout_s
    use_threads(config.training.threads)
    compute_alike(config.training.deterministic)
    keep_freed_memory()
    topology = form_job(world, config).topology
    changes = measure(config, topology, path, steps)
    if world.rank == 0:
        print(
            f"{count_text(len(changes.deltas), 'step')} of "
            f"{count_text(changes.deltas.shape[1], 'group')}, all of them shared"
        )
        print("\n".join(table(changes)))
        _write(changes, config)


def synchronizing_always(config: Config, path: Path) -> Config:
    """Return `config` with δ = 0, so that all steps synchronize (the paper's figure 5).

    Raises `UserError` if the method has no δ.
    """
    name = config.method.name
    method = dataclasses.replace(config.method, arguments={**config.method.arguments, "delta": 0})
    always = dataclasses.replace(config, method=method)
    with in_file(path):
        with in_section("method", "name"):
            has_delta = "delta" in annotations_of(resolve(name, METHODS))
        long = 10**9  # no schedule over the run is of interest here
        if not has_delta or make_method(always.method, 1, long).schedule.traits.threshold is None:
            raise UserError(
                f"[method] name = {name!r}: it has no delta to probe, as selsync has",
                key=("method", "name"),
                value=name,
            )
    return always


def measure(config: Config, topology: Topology, path: Path, steps: int) -> Changes:
    """Train for `steps` steps and return the changes Δ(g), the same on every rank. Collective."""
    with topology.raise_on_all_ranks("forming groups"):
        if topology.num_groups == 1:
            raise UserError(
                "--delta needs at least two groups: start as many ranks as the job has, and set "
                "[parallel] groups"
            )
    parts = assemble(config, topology, str(path))
    mine: list[float] = []
    for loaded in itertools.islice(_batches(parts, config.lr_schedule.interval), steps):
        x, y = parts.vary(*loaded)
        with parts.precision.computing():
            loss = parts.task.loss(parts.model(x), y)
        if not loss.isfinite():
            raise JobError(
                f"the loss is {loss.item()} after {count_text(parts.optimizer.t, 'step')}: try a lower rate"
            )
        parts.optimizer.zero_grad()
        parts.precision.backward(loss)
        parts.batches.advance()
        if not parts.precision.step(parts.optimizer, loss=loss):
            continue
        if parts.scheduler is not None and config.lr_schedule.interval == "step":
            parts.scheduler.step()
        mine.append(_noted(parts.optimizer.metrics))
    rows: Iterator[tuple[float, ...]] = zip(*topology.inter_group.gather_objects(mine), strict=True)
    return changes_of([list(row) for row in rows])


def _noted(metrics: Mapping[str, float]) -> float:
    """Return the Δ of this rank's group in the last step."""
    if "delta" not in metrics:
        message = '[method] name: its schedule has a threshold, and so has to note s.metrics["delta"]'
        raise UserError(message, key=("method", "name"))
    return metrics["delta"]


def _batches(parts: TrainingSetup, scheduled_per: str) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count(1):
        for batch in parts.loader:
            x, y = batch if parts.injected is None else parts.injected.complete(batch)
            yield x, y
        parts.sampler.set_epoch(epoch)
        if parts.scheduler is not None and scheduled_per == "epoch":
            parts.scheduler.step()


def _write(changes: Changes, config: Config) -> None:
    folder = config.run.output_dir.with_name(f"{config.run.output_dir.name}-delta")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "delta.json") as part:
        part.write_text(json.dumps(to_json(changes, setting(config)), indent=1) + "\n")
    with replacing(folder / "delta.png") as part:
        plot(changes, part)
    print(f"written {folder}/delta.json and delta.png; train with --method.delta")
