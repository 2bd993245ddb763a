"""All that a step of a method sends, put together as `DistributedOptimizer.step` does.

    exchange → [when?] → how → allgather

What happens at a meeting counts with the share of the steps after which groups meet.

Where torch shards the model over the group there is no allgather of ours. torch gathers each block before it
is computed, in the forward pass and in the backward pass, and scatters the sums of its gradients: in a step
of one backward pass, which uses all parameters. That is in no ledger.
"""

from __future__ import annotations

from dataclasses import replace

from hpcsgd.core.capabilities import Foreseen, ForPeers
from hpcsgd.core.method import Method
from hpcsgd.core.step import Exchange, publications, publisher
from hpcsgd.core.traffic import Message, Sizes, Stage, gathers, sends
from hpcsgd.errors import UserError
from hpcsgd.exchanges import Gathered
from hpcsgd.exchanges.by_torch import left_to_torch

BY_TORCH = "by torch"
"""The phase of messages that torch sends."""


def of_step(
    method: Method, m: Sizes, *, elementwise: bool = True, meets: float | None = None
) -> list[Message]:
    """The messages of a step, on the mean, in the order in which they leave.

    `meets`: the share of steps after which groups meet, for methods that decide that by what they see.
    Raises `UserError` for these without it, where a sparsifier cannot tell what it selects, and for what
    cannot be where torch shards the model.
    """
    exchange = exchange_of(method, m, elementwise)
    found = by_torch(m)
    found += [x.within("gradients") for x in sends(exchange, m)]
    if m.P > 1 or averages_with_peers(method):
        found += [x.within("other") for x in sends(method.when, m)]
        found += [
            replace(x.within("average", share_of_meetings(method, meets)), stage="meeting")
            for x in of_meeting(method, exchange, m)
        ]
    if exchange.shards:
        found += gathered(exchange, m)
    return found


def of_meeting(method: Method, exchange: Exchange, m: Sizes) -> list[Message]:
    """What groups send when they meet; chunks and whole models follow from each other by an allgather."""
    how = method.how
    before = gathers(m) if exchange.shards and not how.shards else []
    after = gathers(m) if how.shards and not exchange.shards else []
    return [*before, *sends(how, m), *after]


def gathered(exchange: Exchange, m: Sizes) -> list[Message]:
    """What makes one model of the positions' chunks: each bucket while others are worked on, but where the
    exchange has a way of its own, which knows all of them."""
    if publisher(exchange) is not None:
        return list(publications(exchange, m))
    return [replace(x, bucket=i, stage="gather") for i, x in enumerate(gathers(m))]


def by_torch(m: Sizes) -> list[Message]:
    """What torch sends inside a group whose model it shards, of each unit by itself; the outermost one is
    whole from the forward pass on."""
    if m.K == 1:
        return []
    units = list(enumerate(m.units))
    found = [_of_unit("allgather", "forward", i, unit.weights) for i, unit in reversed(units)]
    for i, unit in units:
        found += [] if unit.stays else [_of_unit("allgather", "backward", i, unit.weights)]
        found += [_of_unit("reduce_scatter", "reduce", i, unit.gradients)] if unit.gradients else []
    return found


def _of_unit(operation: str, stage: Stage, i: int, nbytes: int) -> Message:
    return Message(operation, "group", nbytes, BY_TORCH, bucket=i, stage=stage)


def exchange_of(method: Method, m: Sizes, elementwise: bool = True) -> Exchange:
    """As the engine has it, for an optimizer that is `elementwise` or looks at whole tensors.

    Raises `UserError` for what cannot be where torch shards the model.
    """
    exchange = method.exchange
    if m.sharded:
        if not elementwise:
            raise UserError("a sharded model: the optimizer is not known to update every element by itself")
        return left_to_torch(exchange)
    return Gathered(exchange) if exchange.shards and not elementwise else exchange


def share_of_meetings(method: Method, meets: float | None = None) -> float:
    """Of all steps, those after which groups meet; `meets` where the method cannot tell."""
    when = method.when
    share = when.share if isinstance(when, Foreseen) else None
    if share is not None:
        return share
    if meets is None:
        raise UserError(
            "how often the groups meet depends on the gradients: say the share of steps, from a probe of "
            "delta or an earlier run"
        )
    return meets


def averages_with_peers(method: Method) -> bool:
    """Whether its groups are jobs of their own."""
    return isinstance(method.how, ForPeers) and method.how.for_peers
