"""The exposed seconds of a step: those in which a rank only waits for messages.

Messages overlap with each other, with computation and with updates. One bucket may be reduced inside its
group while another one is reduced between groups or is updated. A communication thread executes messages in
the order in which they were started. Messages inside groups and between groups do not overlap if they share
links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Seconds = Sequence[float]


@dataclass(frozen=True)
class Buckets:
    """The seconds of each stage of a step, as a list with one entry per bucket."""

    inside: Seconds
    """Gradient reduction inside the group."""
    across: Seconds
    """Gradient reduction between groups."""
    model_average: Seconds
    """The model average, if each bucket is averaged separately; otherwise 0."""
    gather: Seconds
    """The allgather of the bucket's shards in the group."""
    own_links: bool
    """True if messages inside groups and between groups use separate links."""


@dataclass(frozen=True)
class Update:
    """The optimizer's update of all elements that a rank updates, and when its parts can begin."""

    seconds: float
    in_parts: bool
    """True if each bucket is updated as soon as its own gradients are reduced."""
    gathered: bool
    """True if, in a local step, each bucket's parameters are gathered right after its update."""


@dataclass(frozen=True)
class Exposed:
    """The exposed seconds of a step, by stage: those in which a rank only waits for communication."""

    grad_reduce: float
    gather: float
    """The exposed seconds of the parameter gather in a local step."""
    gather_after_sync: float
    """The exposed seconds of the parameter gather in a step with a synchronization."""


def exposed(ready: Seconds, backward: float, b: Buckets, update: Update) -> Exposed:
    """Return the exposed seconds of a step.

    `ready`: when the gradients of each bucket are ready, in seconds from the start of the backward pass.
    `backward`: the seconds of that pass.
    """
    inside, reduced = _reduced(ready, b)
    updated = _updated(reduced, backward, update)
    end = updated[-1]
    at = updated if update.gathered and b.own_links else [end] * len(updated)
    gathered = pipelined([max(inside, x) for x in at], b.gather)
    averaged = _running(b.model_average)
    at = averaged if b.own_links else [averaged[-1]] * len(averaged)
    return Exposed(
        grad_reduce=max(end - backward - update.seconds, 0.0),
        gather=gathered - end,
        gather_after_sync=pipelined(at, b.gather) - averaged[-1],
    )


def pipelined(ready: Seconds, seconds: Seconds) -> float:
    """Return when the last of some messages is done, if they are sent one by one.

    Message i begins at ready[i] or later and takes seconds[i].
    """
    done = 0.0
    for start, takes in zip(ready, seconds, strict=True):
        done = max(done, start) + takes
    return done


def awaited(used: Seconds, gather: Seconds, forward: float) -> float:
    """Return the seconds for which a forward pass waits for parameters that are gathered during the pass.

    Parameters that are used first are gathered first. `used`: elements of each bucket, in the order of the
    backward pass. `gather`: seconds of each bucket's gather. `forward`: seconds of the forward pass.
    """
    done = arrived = 0.0
    for elements, seconds in zip(reversed(used), reversed(gather), strict=True):
        arrived += seconds
        done = max(done, arrived) + forward * elements / sum(used)
    return done - forward


def among_blocks(compute: Seconds, gather: Seconds, reduce: Seconds) -> float:
    """Return the seconds of a forward or backward pass through FSDP units.

    Each list has the seconds of every unit, in the order of the pass. A unit is gathered while the unit
    before it is computed. Its gradients are reduced, on the same links, while the unit after it is computed.
    """
    beside = [g + r for g, r in zip([*gather[1:], 0.0], [0.0, *reduce[:-1]], strict=True)]
    return gather[0] + sum(map(max, compute, beside)) + reduce[-1]


def _reduced(ready: Seconds, b: Buckets) -> tuple[float, list[float]]:
    """Return when the last reduction inside the group is done, and when each bucket is reduced completely."""
    inside = across = 0.0
    done: list[float] = []
    for start, first, second in zip(ready, b.inside, b.across, strict=True):
        inside = max(inside, start) + first
        across = max(across, inside) + second
        done.append(across)
        if not b.own_links:
            inside = across
    return inside, done


def _updated(reduced: Seconds, backward: float, update: Update) -> list[float]:
    if not update.in_parts:
        return [max(reduced[-1], backward) + update.seconds] * len(reduced)
    done, t = [], backward
    for arrived in reduced:
        t = max(t, arrived) + update.seconds / len(reduced)
        done.append(t)
    return done


def _running(seconds: Seconds) -> list[float]:
    return [sum(seconds[: i + 1]) for i in range(len(seconds))]
