"""What is left of messages that go on beside each other: a bucket is in its group while another one crosses
groups, or is updated. A lane carries out what it was given in that order; both do nothing for each other
where they share links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Seconds = Sequence[float]


@dataclass(frozen=True)
class Buckets:
    """Seconds of each bucket's messages, by the stages of a step."""

    inside: Seconds
    """Of its exchange in the group, and"""
    across: Seconds
    """between groups."""
    model_average: Seconds
    """Of its meeting, if there is one and it is through bucket by bucket, and"""
    gather: Seconds
    """of its chunks' way to all of the group."""
    own_links: bool
    """Whether groups and what is between them have links of their own."""


@dataclass(frozen=True)
class Update:
    """Of the whole model, so many `seconds`; `in_parts` as gradients arrive; `gathered` at once where nobody
    meets."""

    seconds: float
    in_parts: bool
    gathered: bool


@dataclass(frozen=True)
class Exposed:
    """Seconds that a rank stands still."""

    exchange: float
    gather: float
    """In a step without a meeting."""
    gather_after_sync: float


def exposed(ready: Seconds, backward: float, b: Buckets, update: Update) -> Exposed:
    """Of gradients that are `ready` then, in a pass that ends with `backward`."""
    inside, exchanged = _exchanged(ready, b)
    updated = _updated(exchanged, backward, update)
    end = updated[-1]
    at = updated if update.gathered and b.own_links else [end] * len(updated)
    gathered = pipelined([max(inside, x) for x in at], b.gather)
    met = _running(b.model_average)
    at = met if b.own_links else [met[-1]] * len(met)
    return Exposed(
        exchange=max(end - backward - update.seconds, 0.0),
        gather=gathered - end,
        gather_after_sync=pipelined(at, b.gather) - met[-1],
    )


def pipelined(ready: Seconds, seconds: Seconds) -> float:
    """When the last of several is done that leave one after another, none before it is `ready`."""
    done = 0.0
    for start, takes in zip(ready, seconds, strict=True):
        done = max(done, start) + takes
    return done


def awaited(used: Seconds, gather: Seconds, forward: float) -> float:
    """Seconds that a forward pass waits for weights that leave when it begins, those used first before the
    rest. `used`: how much of the model is in each bucket; buckets run backwards."""
    done = arrived = 0.0
    for elements, seconds in zip(reversed(used), reversed(gather), strict=True):
        arrived += seconds
        done = max(done, arrived) + forward * elements / sum(used)
    return done - forward


def among_blocks(compute: Seconds, gather: Seconds, reduce: Seconds) -> float:
    """Seconds of a pass through blocks, in this order: each is gathered while the one before it is computed,
    and its gradients leave while the one after it is, on the same links."""
    beside = [g + r for g, r in zip([*gather[1:], 0.0], [0.0, *reduce[:-1]], strict=True)]
    return gather[0] + sum(map(max, compute, beside)) + reduce[-1]


def _exchanged(ready: Seconds, b: Buckets) -> tuple[float, list[float]]:
    """When the lane of the group is through, and when each bucket is."""
    inside = across = 0.0
    done: list[float] = []
    for start, first, second in zip(ready, b.inside, b.across, strict=True):
        inside = max(inside, start) + first
        across = max(across, inside) + second
        done.append(across)
        if not b.own_links:
            inside = across
    return inside, done


def _updated(exchanged: Seconds, backward: float, update: Update) -> list[float]:
    if not update.in_parts:
        return [max(exchanged[-1], backward) + update.seconds] * len(exchanged)
    done, t = [], backward
    for arrived in exchanged:
        t = max(t, arrived) + update.seconds / len(exchanged)
        done.append(t)
    return done


def _running(seconds: Seconds) -> list[float]:
    return [sum(seconds[: i + 1]) for i in range(len(seconds))]
