"""What happens to the optimizer's moments (momentum, second moments) when groups meet.

The paper leaves it open. Kept is what local SGD codes do; Averaged costs another M/K for every state
tensor; Reset starts each round afresh.

A group that has never had a gradient for a parameter has no state for it. Averaged counts there what the
optimizer would start from, and so the numbers of a whole parameter (how many steps it has seen) are averaged
with its moments: those of Adam divide by them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import phase
from hpcsgd.core.averager import Averager, Traits
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout, allreduce
from hpcsgd.parts.averagers.flattened import average_flattened, require_same_layout

WithOptimizerState = Callable[[Averager], Averager]
"""Makes of an averager one that does something about the moments, too."""


@checked
def keep_state(inner: Averager) -> Averager:
    """At a meeting every group goes on with its own momentum: nothing is sent. For `optimizer_state`, and the
    default.

    Not to be confused with `AverageState`, which sends M/K more for every state tensor, nor with
    `ResetState`.

    Args:
        inner: the averager of models, which it returns as it is.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, optimizer_state=hpcsgd.keep_state)     # the default
        >>> hpcsgd.keep_state(method.averager) is method.averager
        True
    """
    return inner


def average_states(named: Mapping[str, Sequence[Tensor]], s: StepContext) -> None:
    """The optimizer's state tensors of these names become their means over the groups. Collective; raises
    `UserError` where groups have others."""
    with phase("moments"):
        require_same_layout(named, s.topology.inter_group, "the optimizers' state tensors")
        for tensors in named.values():
            average_flattened(tensors, s.topology.inter_group)


def comparison() -> CommOp:
    """Of what groups are about to average."""
    return allreduce("cross", 16, "moments")


def sent_by_state(m: ModelLayout, layers: Collection[int], shards: bool) -> Iterator[CommOp]:
    """A state tensor like a parameter, which these layers have: of the own chunk, or of all."""
    for width, elements in m.by_width(layers).items():
        yield allreduce("cross", elements * width / (m.K if shards or m.sharded else 1), "moments")


def sent_by_number(m: ModelLayout, layers: Collection[int], shards: bool) -> CommOp:
    """A number of every piece of these layers."""
    return allreduce("cross", (m.rows_of(layers) if shards or m.sharded else len(layers)) * 4, "moments")


@checked
@dataclass(frozen=True)
class AverageState:
    """At a meeting the optimizer's state is averaged, too: every state tensor, and every number that is a
    tensor.

    Another 2·(P−1)/P·M/K elements a rank for each state tensor: one of SGD with momentum, two of Adam. For
    `moments`.

    Not to be confused with `DistributedOptimizer.averaged`, the mean model for an evaluation.

    Args:
        inner: the averager of models, which acts before it. A method gives it.

    Raises:
        UserError: at a meeting where groups have state tensors of unlike sizes.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=2, optimizer_state=hpcsgd.AverageState)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> topology.world.stats.totals()["moments"].bytes > 0
        True
    """

    inner: Averager
    traits: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        traits = replace(self.inner.traits, leaves_mean=False, vectors_only=False)
        object.__setattr__(self, "traits", traits)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterator[Tensor]:
        yield from self.inner.average(vectors, s)
        average_states(s.optimizer_state.tensors(), s)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        yield from comm_ops(self.inner, m)
        yield comparison()
        for layers in m.optimizer_state.values():
            yield from sent_by_state(m, layers, not self.traits.whole_model)
        for layers in m.numbers.values():
            yield sent_by_number(m, layers, not self.traits.whole_model)


@checked
@dataclass(frozen=True)
class ResetState:
    """At a meeting the optimizer gets the state of a new one: nothing is sent. For `optimizer_state`.

    That is not always zeros: Rprop, for one, starts from step sizes.

    Not to be confused with `AverageState`, which keeps what all groups have gathered.

    Args:
        inner: the averager of models, which acts before it. A method gives it.

    Raises:
        UserError: at a meeting where the optimizer's class needs more than its defaults to be made.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=2, optimizer_state=hpcsgd.ResetState)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> len(optimizer.state)
        0
    """

    inner: Averager
    traits: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        traits = replace(self.inner.traits, leaves_mean=False, vectors_only=False)
        object.__setattr__(self, "traits", traits)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterator[Tensor]:
        yield from self.inner.average(vectors, s)
        s.optimizer_state.reset()

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return comm_ops(self.inner, m)


OPTIMIZER_STATE: Mapping[str, WithOptimizerState] = {
    "average": AverageState,
    "keep": keep_state,
    "reset": ResetState,
}
"""As job files call them."""
