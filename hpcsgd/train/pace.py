"""Choose the fastest settings for gradient communication, by a few trial steps or by a machine file."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median

import torch

from hpcsgd.comm import PeerLost
from hpcsgd.comm.streams import on_accelerator, settle
from hpcsgd.config.schema import Config
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError, in_file, in_section, located
from hpcsgd.report.run_folder import JOB_FILE
from hpcsgd.train.loading import batch_of_rank
from hpcsgd.train.predicted import predicted
from hpcsgd.train.reduce_settings import Open, ReduceSettings, is_to_choose, left_open, of_the_run
from hpcsgd.train.training_setup import TrainingSetup, assemble

log = logging.getLogger(__name__)


def tuned(config: Config, topology: Topology, source: str, resume: bool) -> Config:
    """Return `config`, which was read from `source`, with the fastest settings if requested; collective."""
    if not is_to_choose(config.training):
        return config
    section = config.training
    most = max(Counter(topology.world.gather_objects(topology.world.backend.node)).values())
    kept: ReduceSettings | None = None
    with (
        topology.raise_on_all_ranks("choosing how gradients travel"),
        in_file(source),
        in_section("training"),
    ):
        if topology.is_elastic:
            raise UserError(
                "autotune_steps, machine: not supported for groups of `hpcsgd launch`: give "
                "bucket_cap_mb and overlap_grad_reduce",
                key="machine" if section.autotune_steps is None else "autotune_steps",
            )
        choices = left_open(config, topology.group_size)
        if topology.rank == 0:
            kept = of_the_run(config) if resume else None
            if kept is None and section.machine is not None:
                with located("machine", "machine"):
                    kept = _reported(
                        predicted(config, topology.num_groups, topology.group_size, section.machine, most)
                    )
    kept = topology.world.gather_objects(kept)[0]
    if kept is None and section.autotune_steps is not None:
        kept = fastest(config, choices, topology, source, section.autotune_steps)
    assert kept is not None
    return kept.within(config)


def fastest(config: Config, choices: Open, topology: Topology, source: str, steps: int) -> ReduceSettings:
    """Return the fastest of the settings that `choices` allow, by `steps` steps with each; collective.

    All bucket sizes are tried, then the other gradient reductions with the best size, then the best
    combination without overlap.
    """
    overlap, grad_reduce = choices.overlaps[0], choices.grad_reduces[0]
    found: dict[ReduceSettings, float] = {}

    def best_of(tried: Iterable[ReduceSettings]) -> ReduceSettings:
        for sending in tried:
            if sending not in found:
                found[sending] = _seconds(sending.within(config), topology, source, steps)
        return min(found, key=lambda sending: found[sending])

    best = best_of(ReduceSettings(size, overlap, grad_reduce) for size in choices.sizes)
    best = best_of([replace(best, grad_reduce=grad_reduce) for grad_reduce in choices.grad_reduces])
    best_of([replace(best, overlap=overlap) for overlap in choices.overlaps])
    return _reported(found)


def _reported(found: Mapping[ReduceSettings, float]) -> ReduceSettings:
    """Log the seconds per step of all settings in `found`, and return the fastest settings."""
    best = min(found, key=lambda sending: found[sending])
    for sending, seconds in found.items():
        log.info("%.4g s a step with %s%s", seconds, sending, ": taken" if sending == best else "")
    log.info(
        "other buckets and gradient reductions add up in other orders, to other bits: %s keeps these",
        JOB_FILE,
    )
    return best


def _seconds(config: Config, topology: Topology, source: str, steps: int) -> float:
    """Return the median seconds of trial steps, without the first, on the slowest rank; collective."""
    parts = assemble(config, topology, source)
    taken = torch.tensor(
        median(list(_times(parts, config.data.group_batch_size, steps + 1))[1:]),
        dtype=torch.float64,
        device="cpu",
    )
    topology.world.allreduce(taken, "max").wait()
    parts.optimizer.state_dict()  # waits for communication in flight
    if not topology.world.close_dups(config.parallel.timeout_s):
        raise PeerLost(
            f"communication in flight {config.parallel.timeout_s:g} s after steps to choose buckets by"
        )
    del parts
    gc.collect()  # a model and its optimizer refer to each other
    return taken.item()


def _times(parts: TrainingSetup, batch_size: int, steps: int) -> Iterator[float]:
    rows = range(min(batch_of_rank(batch_size, parts.optimizer.topology.group_size), len(parts.train)))
    x, y = parts.vary(*parts.train.collate(parts.train.__getitems__(list(rows))))
    for _ in range(steps):
        parts.optimizer.topology.world.barrier()
        start = time.perf_counter()
        parts.optimizer.zero_grad()
        with parts.precision.computing():
            loss = parts.task.loss(parts.model(x), y)
        parts.precision.backward(loss)
        parts.precision.step(parts.optimizer, loss=loss)
        if on_accelerator(parts.device):
            settle(parts.device)
        yield time.perf_counter() - start
