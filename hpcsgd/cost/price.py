"""The seconds of a step: communication, predicted from a machine file, and a rank's computation.

    forward → backward, with gradient reduction → selection → [sync decision] → update → [model average]
    → allgather

Buckets of gradients are reduced during the backward pass; only the time after the end of the pass counts. If
groups have their own links, one bucket is reduced in its group while another one is reduced between groups
(see `overlap`). Of messages that are sent during the next steps, only the time that exceeds the computation
of these steps counts. The seconds of all other parts are added up. All groups are assumed to compute equally
fast. `hpcsgd simulate` predicts how long groups wait for slower ones.

With FSDP the passes also wait for torch's messages. On devices other than the CPU the messages of an FSDP
unit are sent while its neighbours are computed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcsgd.core.method import parts_of
from hpcsgd.core.optional import elements_searched
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.cost.collectives import sent
from hpcsgd.cost.compute import Compute
from hpcsgd.cost.link_classes import LinkClass, link_classes
from hpcsgd.cost.machine import Machine
from hpcsgd.cost.overlap import Buckets, Update, among_blocks, awaited, exposed
from hpcsgd.cost.traffic import BY_TORCH, of_step
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import UserError
from hpcsgd.parts.sparsifiers import SPARSIFIERS, Sparsifier

LARGER = 0.2
"""The amount added to messages' relative error per doubling of ranks beyond the measured machine.

`benchmarks/model_error.py` measures about this value.
"""
COMPUTE_ERROR = 0.1
"""The assumed relative error e of compute seconds: they are right within a factor 1 + e, up or down."""


@dataclass(frozen=True)
class Computed:
    """The seconds for which a rank computes in a step, by part."""

    forward: float
    backward: float
    selection: float = 0.0
    update: float = 0.0
    slowed: float = 1.0
    """The factor by which the backward pass takes longer while the communication thread is busy."""

    def times(self, factor: float) -> Computed:
        parts = (self.forward, self.backward, self.selection, self.update)
        return Computed(*(factor * part for part in parts), slowed=self.slowed)


@dataclass(frozen=True)
class StepCost:
    """The cost of a step, averaged over many steps."""

    phases: Mapping[str, float]
    """Seconds by phase: `compute`, and the exposed seconds of each phase of communication."""
    low: float
    high: float
    """The bounds of the step's seconds, if every part is faster or slower by its relative error."""
    nbytes: float
    """Bytes that a rank sends, as `CommStats` counts them."""
    hidden: float = 0.0
    """Seconds of communication during which the rank computes, so that it does not wait."""
    behind: float = 0.0
    """Seconds of the messages that are sent during the next steps, hidden or not."""
    by_torch: float = 0.0
    """Bytes that torch sends per rank in addition, for an FSDP model."""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def communication(self) -> float:
        """The share of a step in which a rank waits for communication."""
        return 1 - self.phases["compute"] / self.seconds


def price(
    plan: StepPlan,
    m: ModelLayout,
    machine: Machine,
    computed: Computed,
    *,
    ranks_per_host: int | None = None,
    sync_rate: float | None = None,
    overlap: bool = True,
    prefetch: bool = False,
    broadcast: float = 0.0,
) -> StepCost:
    """Return the predicted cost of a step of `plan` on `machine`.

    `sync_rate`, `broadcast`: see `hpcsgd.cost.traffic.of_step`.
    `overlap`: True if gradients are reduced during the backward pass.
    `prefetch`: True if parameters are gathered during the next forward pass.

    Raises `UserError` if the messages cannot be predicted, or if the machine file lacks links for them.
    """
    sent_in_step = of_step(plan, m, sync_rate=sync_rate, broadcast=broadcast)
    over = link_classes(m.P, m.K, ranks_per_host or machine.ranks_per_host)
    over["replica_groups"] = over["inter_group"]
    apart = over["intra_group"].kind == "inside" != over["inter_group"].kind
    flow = _Flow(plan, overlap=overlap, prefetch=prefetch, own_links=apart)
    beyond = LARGER * max(math.log2(m.N / (machine.hosts * machine.ranks_per_host)), 0.0)

    def total(sign: int) -> tuple[dict[str, float], float]:
        timed = [(x, _seconds(x, machine, over[x.over], beyond, sign)) for x in sent_in_step]
        ours = [(x, s) for x, s in timed if x.phase != BY_TORCH]
        inside = sum(
            s
            for x, s in ours
            if over[x.over].kind == "inside"
            and not x.overlap_steps
            and (x.bucket is None or x.stage == "gather")
        )
        passes = computed.times((1 + COMPUTE_ERROR) ** sign)
        theirs = [(x, s) for x, s in timed if x.phase == BY_TORCH]
        waiting = _waiting(theirs, m, passes, machine.machine.device != "cpu")
        waited = waiting.forward + waiting.backward
        inside -= waited if over["intra_group"].kind != "inside" else 0.0
        longer = replace(
            passes, forward=passes.forward + waiting.forward, backward=passes.backward + waiting.backward
        )
        phases, hidden = _standing_still(ours, m, longer, inside, flow)
        if theirs:
            phases |= {"compute": phases["compute"] - waited, BY_TORCH: waited}
        return phases, hidden + sum(s for _, s in theirs) - waited

    phases, hidden = total(0)
    behind = sum(_seconds(x, machine, over[x.over], beyond, 0) for x in sent_in_step if x.overlap_steps)
    low, high = (sum(total(sign)[0].values()) for sign in (-1, 1))
    nbytes: dict[bool, float] = defaultdict(float)
    for x in sent_in_step:
        each = float(sent(x.operation, x.nbytes, m.ranks(x.over)))
        nbytes[x.phase == BY_TORCH] += x.times * x.sender_fraction * each
    return StepCost(phases, low, high, nbytes[False], hidden, behind, nbytes[True])


def over_run(costs: Sequence[tuple[StepCost, int]]) -> StepCost:
    """Return the mean cost of a run's steps; `costs` has each stage's cost and number of steps."""
    if len(costs) == 1:
        return costs[0][0]
    total = sum(steps for _, steps in costs)

    def mean(of: Callable[[StepCost], float]) -> float:
        return sum(of(cost) * steps for cost, steps in costs) / total

    return StepCost(
        phases={
            name: mean(lambda cost, name=name: cost.phases.get(name, 0.0))
            for name in dict.fromkeys(name for cost, _ in costs for name in cost.phases)
        },
        low=mean(lambda cost: cost.low),
        high=mean(lambda cost: cost.high),
        nbytes=mean(lambda cost: cost.nbytes),
        hidden=mean(lambda cost: cost.hidden),
        behind=mean(lambda cost: cost.behind),
        by_torch=mean(lambda cost: cost.by_torch),
    )


def computed(plan: StepPlan, m: ModelLayout, compute: Compute, batch: float) -> Computed:
    """Return the seconds for which a rank with `batch` samples computes in a step.

    Raises `UserError` if a part of the step was not measured.
    """
    elements = elements_searched(plan.grad_reduce, m)
    selection = compute.selection_seconds(_sparsifier(plan), elements) if elements else 0.0
    updated = m.M / m.K if plan.grad_reduce.traits.leaves_shards else m.M
    busy = compute.busy
    return Computed(
        forward=compute.forward_seconds(batch),
        backward=compute.backward_seconds(batch),
        selection=selection,
        update=compute.update_seconds(updated) if compute.update_seconds_per_element else 0.0,
        slowed=(busy.backward if busy and busy.backward else 1.0),
    )


@dataclass(frozen=True)
class _Flow:
    """The conditions that decide which parts of a step may overlap; see `price`."""

    plan: StepPlan
    overlap: bool
    prefetch: bool
    own_links: bool
    """True if groups are inside hosts and messages between groups are not, so that they share no links."""


def _seconds(x: CommOp, machine: Machine, way: LinkClass, beyond: float, sign: int) -> float:
    factor = (1 + machine.relative_error(x.operation, way) + beyond) ** sign
    nbytes = x.nbytes
    if way.kind != "inside":  # not all ranks of a host may send to other hosts
        nbytes *= x.off_host_fraction * (x.sender_fraction if way.kind == "mixed" else 1.0)
    seconds = machine.seconds(x.operation, nbytes, way) * x.contention
    if x.reduced and seconds and machine.compute and machine.compute.mean_seconds_per_element:
        seconds += machine.compute.mean_seconds(x.reduced)
    return x.times * seconds * factor


@dataclass(frozen=True)
class _Waiting:
    """The seconds for which the forward and the backward pass wait for torch's messages."""

    forward: float
    backward: float


def _waiting(timed: Iterable[tuple[CommOp, float]], m: ModelLayout, c: Computed, beside: bool) -> _Waiting:
    """Return how long the passes wait for torch's messages, which are in `timed` with their seconds.

    `beside`: True if devices compute while messages are sent. Each element is assumed to take equally long.
    """
    seconds = {stage: [0.0] * len(m.units) for stage in ("forward", "backward", "reduce")}
    for x, s in timed:
        assert x.bucket is not None
        seconds[x.stage][x.bucket] += s
    gather, again, reduce = seconds.values()
    if not beside or not m.units:
        return _Waiting(sum(gather), sum(again) + sum(reduce))
    parts = [unit.numel / sum(each.numel for each in m.units) for unit in m.units]
    forward = among_blocks([c.forward * x for x in parts[::-1]], gather[::-1], [0.0] * len(parts))
    backward = among_blocks([c.backward * x for x in parts], again, reduce)
    return _Waiting(max(forward - c.forward, 0.0), max(backward - c.backward, 0.0))


def _standing_still(
    timed: Iterable[tuple[CommOp, float]], m: ModelLayout, c: Computed, inside: float, flow: _Flow
) -> tuple[dict[str, float], float]:
    """Return the exposed seconds of the operations in `timed` by phase, and the hidden seconds.

    Messages that are sent during the next steps share the network with the messages of these steps. So only
    computation in these steps can hide them, and messages inside hosts, which take `inside` seconds a step.
    """
    phases: dict[str, float] = defaultdict(float)
    stages = {stage: [0.0] * len(m.buckets) for stage in ("inside", "across", "model_average", "gather")}
    behind: dict[str, float] = defaultdict(float)
    busy = share = 0.0
    for x, seconds in timed:
        if x.overlap_steps:
            behind[x.phase] += seconds
            busy = max(busy, min(1.0, x.times * x.overlap_steps))
            continue
        if x.bucket is None or x.stage == "model_average":
            phases[x.phase] += seconds
        if x.bucket is not None:
            stage = x.stage if x.stage != "grad_reduce" else "across" if x.over == "inter_group" else "inside"
            stages[stage][x.bucket] += seconds / (x.times or 1.0)
            share = x.times if x.stage == "model_average" else share
    buckets, plan = Buckets(**stages, own_links=flow.own_links), flow.plan
    grad_reduce, gather = sum(buckets.inside) + sum(buckets.across), sum(buckets.gather)
    beside = min(c.backward, grad_reduce) if flow.overlap else 0.0
    backward = c.backward + (c.slowed - 1) * beside
    update = Update(c.update, plan.update_per_bucket, plan.gather_per_bucket)
    rest = exposed(_ready(m, backward, flow.overlap), backward, buckets, update)
    gathering = (1 - share) * rest.gather + share * rest.gather_after_sync
    if flow.prefetch:
        gathering = awaited([b.used for b in m.buckets], buckets.gather, c.forward)
    hidden = max(grad_reduce - rest.grad_reduce, 0.0) + gather - gathering
    phases["grad_reduce"] += rest.grad_reduce
    phases["param_gather"] += gathering
    phases["compute"] = c.forward + backward + c.selection + c.update
    late = sum(behind.values())
    over = max(late - busy * (phases["compute"] + inside), 0.0)
    for name, seconds in behind.items():
        phases[name] += seconds * over / late if late else 0.0
    hidden += late - over
    return {name: seconds for name, seconds in phases.items() if seconds or name == "compute"}, hidden


def _ready(m: ModelLayout, backward: float, overlap: bool) -> list[float]:
    """Return when the gradients of each bucket are ready, in seconds, if all elements take equally long."""
    if not overlap:
        return [backward] * len(m.buckets)
    done, found = 0, []
    for b in m.buckets:
        done += b.used
        found.append(backward * done / m.M)
    return found


def _sparsifier(plan: StepPlan) -> str:
    """Return the name that the plan's sparsifier has in job files. Raises `UserError` if it has none."""
    for _, part in parts_of("grad_reduce", plan.grad_reduce):
        for name, kind in SPARSIFIERS.items():
            if isinstance(kind, type) and isinstance(part, Sparsifier) and type(part) is kind:
                return name
    raise UserError("the sparsifier is none of ours: what its search takes was not measured")
