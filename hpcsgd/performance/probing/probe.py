"""Find how many groups P a training can use: measure distances D for P = 2, 4, 8, and so on.

D is the mean distance of the groups' models from their average. More groups are tried until D stops growing.
The procedure is from the hierarchical local SGD paper, section III-C. Differences from the paper:

- Virtual groups on few ranks stand for P × K real ranks.
- The warm-up is shorter. One model, from which all groups start, trains alone for `Plan.settle` steps at the
  learning rate of a single group. Then the rate climbs to the real run's over `Plan.ramp` synchronizations.
  Distances are meaningful only at the real rate: at a fixed rate they saturate at P ≈ 4 for any model. A
  ramp from the first step on gives other distances (benchmarks/probe_distances.py), because gradients are
  large at the start. The paper's figure 4, too, shows the time after the warm-up.
- Every P trains until its distance D is flat. D drifts slowly, so the last two P are compared after equally
  many synchronizations. If the larger P needs more, the smaller P is trained again, which saves memory.
- The loss of the averaged model is a second criterion.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.comm.streams import HOST
from hpcsgd.core.topology import raise_on_all_ranks
from hpcsgd.engine.lr import lr_scale
from hpcsgd.errors import UserError, count_text
from hpcsgd.performance.probing.idle import IN_MEMORY, Offload
from hpcsgd.performance.probing.memory import model_bytes, require_room
from hpcsgd.performance.probing.replicas import DivergedError, VirtualGroups
from hpcsgd.train.growth import COMPARED, THRESHOLD, Growth, Verdict, growths_of, is_flat, verdict

GROUPS = (2, 4, 8, 16, 32)
BEHIND = 1.1
"""The report objects to the resulting P if its loss is more than this multiple of the smallest P's loss."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a probe. Raises `UserError` if a probe cannot find a P with them."""

    groups: Sequence[int] = GROUPS
    sync_every: int
    """Steps between two synchronizations (I)."""
    batch_size: int
    """Samples per step of one group (B)."""
    lr: float
    """Learning rate of a single group (μ0)."""
    rule: str = "linear"
    """How the learning rate grows with P, as in `lr_scale`: "linear", "root" or "none"."""
    seeds: Sequence[int] = (1,)
    settle: int = 100
    """Steps for which one model trains alone, before all groups start from it."""
    ramp: int = 2
    """Number of synchronizations during which the learning rate climbs from one group's to P groups'."""
    cap: int = 20
    """The largest number of synchronizations, after which the distance D counts even if it is not flat."""
    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        P = list(self.groups)
        if sorted(set(P)) != P:
            raise UserError(f"groups = {P}: expected growing numbers, as 2, 4, 8")
        if len(P) < 2 or P[0] < 2:
            raise UserError(f"groups = {P}: at least two numbers of groups from 2 on can be compared")
        if self.cap < self.ramp + COMPARED:
            raise UserError(
                f"cap = {self.cap}: at least ramp + {COMPARED} = {self.ramp + COMPARED} is needed"
            )


@dataclass
class Row:
    """The distances and losses of P groups: a series for each seed, with a value per synchronization."""

    P: int
    lr: float
    distances: list[list[float]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    """Losses of the averaged model on held-out samples."""
    seconds: float = 0.0
    samples: int = 0
    diverged: str | None = None
    """The message about a loss or distance that was not finite, before which the series end; or None."""

    @property
    def D(self) -> float:
        """The median distance at the last synchronizations of all seeds; NaN if there were none."""
        return median([d for series in self.distances for d in series[-COMPARED:]] or [math.nan])


@dataclass
class Probe:
    """The result of a probe, and the measurements that it follows from."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    settled: float = 0.0
    """Seconds for which one model trained alone, before the groups started."""

    @property
    def samples(self) -> int:
        """The number of samples used for training."""
        settling = len(self.plan.seeds) * self.plan.settle * self.plan.batch_size
        return settling + sum(row.samples for row in self.rows)

    @property
    def seconds(self) -> float:
        return self.settled + sum(row.seconds for row in self.rows)

    def num_syncs(self, i: int) -> int:
        """Return the number of synchronizations of the last measured P with the `i`-th seed."""
        return len(self.rows[-1].distances[i]) if self.rows else 0

    @property
    def growths(self) -> list[Growth]:
        """The growth ratios between neighbouring numbers of groups, of those that did not diverge."""
        return growths_of({row.P: row.distances for row in self.rows if row.diverged is None})

    @property
    def diverged(self) -> Row | None:
        """The row of the P whose training diverged, or None. No larger P is tried."""
        return next((row for row in self.rows if row.diverged is not None), None)

    @property
    def verdict(self) -> Verdict:
        found = verdict(self.rows[0].P, self.growths, self.plan.threshold)
        return replace(found, final=found.final or self.diverged is not None)

    def loss_after_equal_samples(self, row: Row) -> float:
        """Return the averaged model's loss after about the number of samples that the smallest P used.

        This loss is rarely as low as the smallest P's, because the smallest P has made more updates.
        """
        smallest = self.rows[0]
        return _loss_after(row, smallest.P * min(map(len, smallest.losses)) // row.P)

    def objection(self) -> str | None:
        """Return an objection if, after equal updates, the P found has a higher loss than the smallest P."""
        first = self.rows[0]
        row = next(row for row in self.rows if row.P == self.verdict.P)
        syncs = min(map(len, first.losses + row.losses))
        ours, theirs = _loss_after(row, syncs), _loss_after(first, syncs)
        if ours <= BEHIND * theirs:
            return None
        return (
            f"after {count_text(syncs * self.plan.sync_every, 'update')} the loss of P = {row.P} is "
            f"{ours:.4g}, that of P = "
            f"{first.P} is {theirs:.4g}: fewer groups may train better than the distances suggest"
        )


def probe(
    start: Callable[[int, int, Communicator], VirtualGroups],
    plan: Plan,
    world: Communicator,
    report: Callable[[Probe], None] = lambda _: None,
    idle: Offload = IN_MEMORY,
) -> Probe:
    """Measure one number of groups P after another until the result is clear. Collective.

    `start(P, seed, world)` builds the virtual groups with a ramped learning rate. `report` is called with the
    probe after every P. `idle` reports how much memory is free for models.
    """
    result = Probe(plan)
    _require_room(start, plan, world, idle)
    began = time.perf_counter()
    settled = {seed: settle(start, plan, world, seed) for seed in plan.seeds}
    result.settled = time.perf_counter() - began
    for P in plan.groups:
        row = Row(P, plan.lr * lr_scale(plan.rule, P))
        for i, seed in enumerate(plan.seeds):
            state = settled[seed]
            enough = partial(_flat_after, result.num_syncs(i), plan)
            _measure(row, i, _from(state, start, P, seed), plan, world, enough)
            if row.diverged is not None:
                break
            if result.rows and (num_syncs := len(row.distances[i])) > result.num_syncs(i):
                smaller, enough = result.rows[-1], lambda distances: len(distances) >= num_syncs
                _measure(smaller, i, _from(state, start, smaller.P, seed), plan, world, enough)
                if smaller.diverged is not None:
                    row = result.rows.pop()  # the smaller P diverged, so the larger one says nothing
                    break
        if not result.rows and row.diverged is not None:
            raise UserError(row.diverged)
        result.rows.append(row)
        report(result)
        if len(result.rows) > 1 and result.verdict.final:
            break
    return result


Enough = Callable[[Sequence[float]], bool]
"""A function of a training's distances so far that returns True if it has synchronized enough."""


def _flat_after(num_syncs: int, plan: Plan, distances: Sequence[float]) -> bool:
    return len(distances) >= num_syncs and is_flat(distances[plan.ramp :])


def settle(
    start: Callable[[int, int, Communicator], VirtualGroups], plan: Plan, world: Communicator, seed: int
) -> dict[str, Tensor]:
    """Return the state from which all groups start: parameters and buffers of a model trained on rank 0.

    The other ranks wait for rank 0 every `plan.sync_every` steps, because one long wait might reach the
    timeout.
    """
    hosts = world.split(int(world.rank == 0), world.rank)
    alone: VirtualGroups | None = None
    state: dict[str, Tensor] | None = None
    with raise_on_all_ranks(world, "starting one model alone"):
        if world.rank == 0:
            alone = start(1, seed, hosts)
    for done in range(0, plan.settle, plan.sync_every):
        with raise_on_all_ranks(world, "training one model alone"):
            if alone is not None:
                alone.train(min(plan.sync_every, plan.settle - done))
    if alone is not None:
        with alone.averaged() as model:
            state = {name: value.to(HOST, copy=True) for name, value in model.state_dict().items()}
    return world.gather_objects(state)[0]


def _from(
    state: dict[str, Tensor], start: Callable[[int, int, Communicator], VirtualGroups], P: int, seed: int
) -> Callable[[Communicator], VirtualGroups]:
    def started(hosts: Communicator) -> VirtualGroups:
        groups = start(P, seed, hosts)
        groups.start_from(state)
        return groups

    return started


def _require_room(
    start: Callable[[int, int, Communicator], VirtualGroups], plan: Plan, world: Communicator, idle: Offload
) -> None:
    """Raise `UserError` if P models do not fit into memory; one model makes a step to get its size."""
    P = plan.groups[0]
    hosts = world.split(int(world.rank < P), world.rank)
    each, device = 0, HOST
    if world.rank < P:
        groups = start(P, plan.seeds[0], hosts)
        with suppress(DivergedError):
            groups.train(1)
        tensors = list(groups.trainees[0].tensors())
        each, device = model_bytes(tensors), tensors[0].device
        del groups
    require_room(max(world.gather_objects(each)), plan.groups, idle.free_bytes(device), world)


def _measure(
    row: Row,
    i: int,
    start: Callable[[Communicator], VirtualGroups],
    plan: Plan,
    world: Communicator,
    enough: Enough,
) -> None:
    """Train `row.P` groups with the `i`-th seed until `enough` is True, and set this series of `row`.

    The ranks from P on have no group and only receive the result.
    """
    began = time.perf_counter()
    hosts = world.split(int(world.rank < row.P), world.rank)
    series: list[tuple[float, float]] = []
    if world.rank < row.P:
        try:
            _sync(start(hosts), plan, enough, series)
        except DivergedError as error:
            row.diverged = str(error)
    series, row.diverged = world.gather_objects((series, row.diverged))[0]
    row.distances[i : i + 1] = [[d for d, _ in series]]
    row.losses[i : i + 1] = [[loss for _, loss in series]]
    row.samples += len(series) * plan.sync_every * plan.batch_size * row.P
    row.seconds += time.perf_counter() - began


def _sync(groups: VirtualGroups, plan: Plan, enough: Enough, series: list[tuple[float, float]]) -> None:
    """Train and synchronize until `enough` returns True, and append each distance and loss to `series`."""
    while len(series) < plan.cap and not enough([D for D, _ in series]):
        groups.train(plan.sync_every)
        D = groups.synchronize()
        if D == 0:
            raise UserError(
                f"D = 0 with {count_text(groups.P, 'group')}: their models stay equal, so nothing trains them"
            )
        series.append((D, groups.loss()))


def _loss_after(row: Row, num_syncs: int) -> float:
    return median(series[min(max(num_syncs, 1), len(series)) - 1] for series in row.losses)
