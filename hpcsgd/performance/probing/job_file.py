"""`hpcsgd probe`: find the number of groups that the training of a job file can use."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hpcsgd.comm import Communicator
from hpcsgd.comm.backend_choice import place_on_node
from hpcsgd.comm.streams import HOST
from hpcsgd.config.schema import Config, DataSection
from hpcsgd.core.topology import raise_on_all_ranks
from hpcsgd.errors import UserError, count_text, in_file
from hpcsgd.files.atomic import replacing
from hpcsgd.performance.probing.idle import IN_MEMORY, Offload, OnDisk
from hpcsgd.performance.probing.probe import GROUPS, Plan, Probe, probe
from hpcsgd.performance.probing.replicas import VirtualGroups
from hpcsgd.performance.probing.report import HEAD, answer, plot, table_row, to_json
from hpcsgd.performance.probing.virtual import virtual_groups
from hpcsgd.train.devices import device_of
from hpcsgd.train.parts import make_method
from hpcsgd.train.probe_answer import fitting, setting
from hpcsgd.train.process import compute_alike, join_world, keep_freed_memory, use_threads

log = logging.getLogger(__name__)


def run(
    path: Path,
    read: Callable[[], Config],
    *,
    groups: str | None,
    repeats: int,
    ranks: int | None,
    idle: Path | None,
) -> None:
    """Probe the job file, print the number of groups, and write ``probe.json`` and ``probe.png``.

    Every rank calls this. `read` reads the job file at `path`. `groups` are the numbers to try as text, such
    as ``2,4,8``. `idle` is a folder for the models of groups that are not training.
    """
    world, config = join_world(read)
    with raise_on_all_ranks(world, "preparing to probe"):
        plan = plan_of(config, path, _numbers(groups), repeats)
        if ranks is not None and ranks < 1:
            raise UserError(f"--ranks {ranks}: at least 1 is needed")
        folder = config.run.output_dir.with_name(f"{config.run.output_dir.name}-probe")
    world.timeout = config.parallel.timeout_s
    use_threads(config.training.threads)
    compute_alike(config.training.deterministic)
    keep_freed_memory()
    with raise_on_all_ranks(world, "making room for idle models"):
        room = IN_MEMORY if idle is None else OnDisk(idle)
    place = place_on_node(world)
    with raise_on_all_ranks(world, "choosing a device"), in_file(path):
        device = device_of(config.training, place)
    result = probe_config(config, plan, world, room, device)
    if world.rank == 0:
        print(answer(result))
        if ranks is not None:
            P = fitting(result.verdict.P, ranks)
            print(f"for {count_text(ranks, 'rank')}: {count_text(P, 'group')} of K = {ranks // P}")
        _write(result, config, folder)


def _numbers(groups: str | None) -> list[int] | None:
    try:
        return None if groups is None else [int(word) for word in groups.split(",")]
    except ValueError:
        raise UserError(f"--groups {groups}: expected numbers, as 2,4,8") from None


def plan_of(config: Config, path: Path, groups: Sequence[int] | None, repeats: int) -> Plan:
    """Return the plan of a probe. Raises `UserError` if the job's method cannot be judged by distances."""
    if repeats < 1:
        raise UserError(f"--repeats {repeats}: at least 1 is needed")
    with in_file(path):
        _require_plain(config.data)
        long = 10**9  # schedules by epochs are rejected below
        method = make_method(config.method, steps_per_epoch=long, total_steps=long)
        period = method.schedule.traits.period
        if period is None or not method.averager.traits.leaves_mean:
            raise UserError(
                f"[method] name = {config.method.name!r}: the probe needs a method that averages models "
                "after a fixed number of steps and keeps the momentum: hierarchical, allreduce_local_sgd",
                key=("method", "name"),
                value=config.method.name,
            )
    if method.grad_reduce.traits.keeps_gradients:
        log.warning("[method] grad_reduce: the probe reduces whole gradients, and its answer holds for these")
    if config.lr_schedule.scaling == "none":
        log.warning(
            "[lr_schedule] scaling = none: the paper's rule assumes a learning rate that grows with the "
            "groups; without it the distance says little about how many groups the training stands"
        )
    return Plan(
        groups=tuple(groups or GROUPS),
        sync_every=period,
        batch_size=config.data.group_batch_size,
        lr=config.optimizer.lr,
        rule=config.lr_schedule.scaling,
        seeds=tuple(range(config.seed, config.seed + repeats)),
    )


def _require_plain(data: DataSection) -> None:
    for key in ("partition", "overlap_share", "injection"):
        if getattr(data, key) is not None:
            raise UserError(
                f"[data] {key}: the probe assigns all samples to its virtual groups, each once: "
                "remove this key, or choose groups without a probe",
                key=("data", key),
            )


def probe_config(
    config: Config, plan: Plan, world: Communicator, idle: Offload = IN_MEMORY, device: torch.device = HOST
) -> Probe:
    """Probe the training that `config` describes. Collective; rank 0 prints a table row for every P."""
    K = config.parallel.group_size or 1
    config = _without_masters(config)

    def start(P: int, seed: int, hosts: Communicator) -> VirtualGroups:
        seeded = dataclasses.replace(config, seed=seed)
        ramp = plan.ramp * plan.sync_every
        return virtual_groups(seeded, P, K, hosts, warm_up_steps=ramp, idle=idle, device=device)

    def report(result: Probe) -> None:
        if world.rank == 0:
            if len(result.rows) == 1:
                print(HEAD, flush=True)
            print(table_row(result), flush=True)

    return probe(start, plan, world, report, idle)


def _without_masters(config: Config) -> Config:
    """Return `config` with precision bf16 in place of bf16_master, which virtual groups do not support."""
    if config.training.precision != "bf16_master":
        return config
    log.warning("[training] precision: the probe's groups train with bf16, whose parameters have 32 bits")
    return dataclasses.replace(config, training=dataclasses.replace(config.training, precision="bf16"))


def _write(result: Probe, config: Config, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "probe.json") as part:
        part.write_text(json.dumps(to_json(result, setting(config)), indent=1) + "\n")
    with replacing(folder / "probe.png") as part:
        plot(result, part)
    print(f"written {folder}/probe.json and probe.png; train with --probe {folder}/probe.json")
