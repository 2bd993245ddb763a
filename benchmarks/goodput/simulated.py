"""Simulate each measured run, and jobs of up to 1,000 nodes.

At scale a group is a node. A restart takes as long for a group as for the whole job: the time in the queue
plus the time until it trains. Costs that do not depend on failures are left out of all figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from goodput.contestants import DDP, GROUPS, SYNC
from goodput.measured import CHECKPOINT
from goodput.settings import Hazard, Setting
from hpcsgd.core.waits import All, Living, Waits
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation import Constant, Durations, Failures, Layout, Simulation, simulate
from hpcsgd.performance.simulation.failures import daly, mean_goodput

Row = dict[str, Any]
SEEDS = 4
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
NODES = 1000
STEP, EVERY, EPOCH = 5.0, 5, 50
"""Seconds of a step, steps per round, and steps per epoch."""
SAVING = 30.0
"""Seconds that a checkpoint of the one job takes."""
HEARTBEAT_TIMEOUT = 10.0
"""The default of `hpcsgd launch`. A failed node is noticed only because it sends no more heartbeats."""
RESTARTS = {"no queue": 2 * MINUTE, "5 min in the queue": 7 * MINUTE, "30 min in the queue": 32 * MINUTE}
"""Seconds until training continues: the time in the queue and 2 minutes."""
MTBFS = [MINUTE * 2**k for k in (0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10, 10.5)]
"""Mean seconds between failures of the job: from a minute to a day."""
TABLE_NODES = (1, 10, 100, 1000)
TABLE_MTBFS = {"an hour": HOUR, "a day": DAY, "a week": 7 * DAY, "a month": 30 * DAY, "a quarter": 90 * DAY}
TABLE_RESTART = "5 min in the queue"
HORIZON = 1200
"""The number of simulated steps."""
SLOW = 2.0
"""The longest restart, in mean times between failures, with which the one job is simulated.

For longer restarts Daly's formula for the mean gives its goodput. The simulation agrees with that formula.
"""


def in_small(setting: Setting, row: Mapping[str, Any]) -> float | None:
    """Return the simulated goodput of a measured row, with its number of failures and its restart time.

    It is None if the row cannot be simulated.
    """
    if row["who"] not in (GROUPS, SYNC, DDP) or not row["failures"] or row["restart_s"] is None:
        return None
    hazard = Hazard(setting, row["seen_mtbf_s"])
    step = setting.P * setting.batch / row["undisturbed_samples_per_s"]
    failures = Failures(
        mtbf_seconds=hazard.of_a_node,
        rank_mtbf_seconds=hazard.of_a_rank,
        checkpoint_seconds=CHECKPOINT,
        restart_seconds=row["restart_s"],
        work_seconds=100 * row["seen_mtbf_s"],
        interval_seconds=row["checkpoint_every_steps"] * step,
        heartbeat_timeout_seconds=0.0,  # a killed process is noticed at once, because its connection closes
    )
    layout = Layout(setting.P, setting.K, setting.per_node)
    if row["who"] == GROUPS:
        steps, waits = round(row["seconds"] / step), Living(setting.every)
        return _of_groups(layout, step, waits, failures, steps, setting.epoch)
    return _of_one_job(layout, failures)


def at_scale() -> list[Row]:
    """Return rows for `NODES` nodes against the mean time between failures of the job."""
    return [
        {"part": "at scale", "nodes": NODES, "restart": name, "restart_s": restart, "mtbf_s": mtbf,
         **_both(NODES, NODES * mtbf, restart)}
        for name, restart in RESTARTS.items()
        for mtbf in MTBFS
    ]  # fmt: skip


def by_nodes() -> list[Row]:
    """Return rows for few and many nodes against the mean time between failures of one node."""
    restart = RESTARTS[TABLE_RESTART]
    return [
        {"part": "by nodes", "nodes": nodes, "restart_s": restart, "node_mtbf": name, "node_mtbf_s": mtbf,
         **_both(nodes, mtbf, restart)}
        for name, mtbf in TABLE_MTBFS.items()
        for nodes in TABLE_NODES
    ]  # fmt: skip


def _both(nodes: int, node_mtbf: float, restart: float) -> dict[str, float]:
    """Return the goodput of groups and of one job."""
    M = node_mtbf / nodes
    failures = Failures(
        node_mtbf, checkpoint_seconds=SAVING, restart_seconds=restart, work_seconds=100 * M,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
    )  # fmt: skip
    layout = Layout(nodes, 1)
    seeds = 1 if nodes >= NODES / 10 else SEEDS
    replica_groups = _of_groups(layout, STEP, Living(EVERY), failures, HORIZON, EPOCH, seeds)
    if restart > SLOW * M or SAVING > M:
        return {GROUPS: replica_groups, SYNC: mean_goodput(failures, M, daly(SAVING, M))}
    return {GROUPS: replica_groups, SYNC: _of_one_job(layout, failures)}


def _of_groups(
    layout: Layout,
    step: float,
    waits: Waits,
    failures: Failures,
    steps: int,
    per_epoch: int,
    seeds: int = SEEDS,
) -> float:
    """Return useful steps over the steps that fit into the time.

    It is 0 if the simulation fails because no group survives an epoch.
    """
    try:
        rates = [_rate(layout, step, waits, failures, steps, per_epoch, seed) for seed in range(1, seeds + 1)]
    except UserError:
        return 0.0
    return fmean(rates) * step


def _rate(
    layout: Layout, step: float, waits: Waits, failures: Failures, steps: int, per_epoch: int, seed: int
) -> float:
    job = Simulation(
        layout=layout, compute=Constant(step), durations=Durations(), waits=waits, steps=steps,
        failures=failures, steps_per_epoch=per_epoch, seed=seed,
    )  # fmt: skip
    return simulate(job).steps_per_second


def _of_one_job(layout: Layout, failures: Failures) -> float:
    job = Simulation(
        layout=layout,
        compute=Constant(STEP),
        durations=Durations(),
        waits=All(period=1),
        steps=1,
        failures=failures,
    )
    try:
        return simulate(job).goodput
    except UserError:  # an interval of work hardly ever fits between failures
        M = failures.mtbf(layout.hosts, layout.N)
        return mean_goodput(failures, M, failures.interval_seconds or daly(failures.checkpoint_seconds, M))
