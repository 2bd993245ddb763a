"""What happens to the optimizer state, such as momentum, at a synchronization.

The hierarchical local SGD paper does not say what happens to it. `keep_state` does what implementations of
local SGD do. `AverageState` averages another M/K elements per rank for every state tensor. `ResetState`
begins with new state after each synchronization.

A group that has never had a gradient for a parameter has no state for it. `AverageState` then uses the
optimizer's initial state. So it must also average state that is one number per parameter, such as the step
count from which Adam computes its bias correction.
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
"""A function that wraps an averager in one that also treats the optimizer state."""


@checked
def keep_state(inner: Averager) -> Averager:
    """Let every group keep its own optimizer state at a synchronization.

    Nothing is sent. This is the default of a method's `optimizer_state`.

    Args:
        inner: Averager of the models, which is returned unchanged.

    Returns:
        `inner` itself.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=8, optimizer_state=hpcsgd.keep_state)     # the default
        >>> hpcsgd.keep_state(method.averager) is method.averager
        True

    See Also:
        `AverageState`: averages the state, which sends M/K elements per state tensor.
        `ResetState`: replaces the state with a new one.
    """
    return inner


def average_states(named: Mapping[str, Sequence[Tensor]], s: StepContext) -> None:
    """Average the optimizer's state tensors over the groups, in place; `named` has them by state name.

    Groups that were left out of the models' average get the mean of the others. If all were left out, the
    groups keep their states. Collective; raises `UserError` if groups have state tensors of different names
    or sizes.
    """
    P, out = s.topology.num_groups, s.left_out
    with phase("state_average"):
        require_same_layout(named, s.topology.inter_group, "the optimizers' state tensors")
        for tensors in named.values() if len(out) < P else ():
            if s.topology.group_index in out:
                for x in tensors:
                    x.zero_()
            average_flattened(tensors, s.topology.inter_group, lambda means: _scale(means, P, P - len(out)))


def _scale(means: Sequence[Tensor], P: int, count: int) -> None:
    """Make means over `count` groups of the means over P groups, of which the others had zeros."""
    if count < P:
        for mean in means:
            mean.mul_(P / count)


def comparison() -> CommOp:
    """Return the operation of `require_same_layout`, which checks that groups have the same state tensors."""
    return allreduce("inter_group", 16, "state_average")


def sent_by_state(m: ModelLayout, layers: Collection[int], shards: bool) -> Iterator[CommOp]:
    """Yield the operations that average one kind of state: a tensor of the size of each parameter.

    `layers` has the indices, in `m.layers`, of the parameters with such state. If `shards` is True, each rank
    averages only its shard.
    """
    for width, elements in m.by_width(layers).items():
        yield allreduce(
            "inter_group", elements * width / (m.K if shards or m.sharded else 1), "state_average"
        )


def sent_by_number(m: ModelLayout, layers: Collection[int], shards: bool) -> CommOp:
    """Return the operation that averages one kind of state: one number for each parameter.

    `layers` has the indices, in `m.layers`, of the parameters with such state. If `shards` is True, each rank
    averages only the numbers of its shard.
    """
    return allreduce(
        "inter_group", (m.rows_of(layers) if shards or m.sharded else len(layers)) * 4, "state_average"
    )


@checked
@dataclass(frozen=True)
class AverageState:
    """Averager that also averages the optimizer state: all tensors, including those of one number.

    Pass it to a method as `optimizer_state`.

    Args:
        inner: Averager of the models, which runs first. A method passes it.

    Raises:
        UserError: At a synchronization, if groups have state tensors of different sizes.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends another 2·(P−1)/P·M/K elements for
        each state tensor: one of SGD with momentum, two of Adam.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=2, optimizer_state=hpcsgd.AverageState)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> optimizer.metrics["distance"] > 0
        True

    See Also:
        `keep_state`: every group keeps its own state.
        `ResetState`: replaces the state with a new one.
    """

    inner: Averager
    traits: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        mean_of = "models and state" if self.inner.traits.mean_of else ""
        traits = replace(self.inner.traits, leaves_mean=False, mean_of=mean_of, vectors_only=False)
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
    """Averager that also gives the optimizer a new state at a synchronization.

    Pass it to a method as `optimizer_state`. Nothing is sent. New state is not always zero; Rprop, for
    example, starts from step sizes.

    Args:
        inner: Averager of the models, which runs first. A method passes it.

    Raises:
        UserError: At a synchronization, if the optimizer's class cannot be made from its defaults.

    Example:
        >>> method = hpcsgd.hierarchical(sync_every=2, optimizer_state=hpcsgd.ResetState)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=2)
        >>> len(optimizer.state)
        0

    See Also:
        `keep_state`: every group keeps its own state.
        `AverageState`: averages the state.
    """

    inner: Averager
    traits: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        mean_of = "models and state" if self.inner.traits.mean_of else ""
        traits = replace(self.inner.traits, leaves_mean=False, mean_of=mean_of, vectors_only=False)
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
"""The values of `optimizer_state`, by their names in job files."""
