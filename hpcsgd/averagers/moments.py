"""What happens to the optimizer's moments (momentum, second moments) when groups meet.

The paper leaves it open. Kept is what local SGD codes do; Averaged costs another M/K for every state
tensor; Reset starts each round afresh.

A group that has never had a gradient for a parameter has no state for it. Averaged counts there what the
optimizer would start from, and so the numbers of a whole parameter (how many steps it has seen) are averaged
with its moments: those of Adam divide by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hpcsgd.averagers.joined import average_joined, require_same_layout
from hpcsgd.core.capabilities import is_regardless_of_gradients, one_by_one
from hpcsgd.core.flat import Bucket
from hpcsgd.core.step import Averager, Step
from hpcsgd.core.traffic import Message, Sizes, allreduce, sends
from hpcsgd.transport import phase

AroundMoments = Callable[[Averager], Averager]
"""Makes of an averager one that does something about the moments, too."""


def kept(inner: Averager) -> Averager:
    """At a meeting every group goes on with its own momentum: nothing is sent. For `moments`, and the
    default.

    Not to be confused with `Averaged`, which sends M/K more for every state tensor, nor with `Reset`.

    Args:
        inner: the averager of models, which it returns as it is.

    Example:
        >>> method = hpcsgd.hierarchical(every=8, moments=hpcsgd.kept)     # as without saying so
        >>> hpcsgd.kept(method.how) is method.how
        True
    """
    return inner


@dataclass(frozen=True)
class Averaged:
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
        >>> method = hpcsgd.hierarchical(every=2, moments=hpcsgd.Averaged)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, method)
        >>> train(optimizer, steps=2)
        >>> job.world.ledger.totals()["moments"].bytes > 0
        True
    """

    inner: Averager

    @property
    def shards(self) -> bool:
        return self.inner.shards

    @property
    def regardless_of_gradients(self) -> bool:
        return is_regardless_of_gradients(self.inner)

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def __call__(self, s: Step) -> None:
        for _ in self.one_by_one(s):
            pass

    def one_by_one(self, s: Step) -> Iterator[Bucket]:
        yield from one_by_one(self.inner, s)
        named = s.moments.tensors()
        with phase("moments"):
            require_same_layout(named, s.job.cross, "the optimizers' state tensors")
            for tensors in named.values():
                average_joined(tensors, s.job.cross)

    def sends(self, m: Sizes) -> Iterator[Message]:
        yield from sends(self.inner, m)
        owners = m.K if self.shards else 1
        yield allreduce("cross", 16, "moments")
        for _ in m.moments:
            for width in dict.fromkeys(b.width for b in m.buckets):
                used = sum(b.used * b.width for b in m.buckets if b.width == width)
                yield allreduce("cross", used / owners, "moments")
        for _ in m.numbers:
            pieces = m.pieces() if self.shards else len(m.layers)
            yield allreduce("cross", pieces * 4, "moments")


@dataclass(frozen=True)
class Reset:
    """At a meeting the optimizer gets the state of a new one: nothing is sent. For `moments`.

    That is not always zeros: Rprop, for one, starts from step sizes.

    Not to be confused with `Averaged`, which keeps what all groups have gathered.

    Args:
        inner: the averager of models, which acts before it. A method gives it.

    Raises:
        UserError: at a meeting where the optimizer's class needs more than its defaults to be made.

    Example:
        >>> method = hpcsgd.hierarchical(every=2, moments=hpcsgd.Reset)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, method)
        >>> train(optimizer, steps=2)
        >>> len(optimizer.state)
        0
    """

    inner: Averager

    @property
    def shards(self) -> bool:
        return self.inner.shards

    @property
    def regardless_of_gradients(self) -> bool:
        return is_regardless_of_gradients(self.inner)

    def before_update(self, s: Step) -> None:
        self.inner.before_update(s)

    def __call__(self, s: Step) -> None:
        for _ in self.one_by_one(s):
            pass

    def one_by_one(self, s: Step) -> Iterator[Bucket]:
        yield from one_by_one(self.inner, s)
        s.moments.reset()

    def sends(self, m: Sizes) -> list[Message]:
        return sends(self.inner, m)


MOMENTS: Mapping[str, AroundMoments] = {"averaged": Averaged, "kept": kept, "reset": Reset}
"""As job files call them."""
