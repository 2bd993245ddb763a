"""One method first and then another: AR/1P-SGP, 2P/1P-SGP (the SGP paper, table 5), post-local SGD."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.comm import Work
from hpcsgd.core.averager import Averager, Traits, run_averager
from hpcsgd.core.flat import Bucket
from hpcsgd.core.method import Method
from hpcsgd.core.optional import begin, finish, is_due
from hpcsgd.core.state import State
from hpcsgd.core.step import (
    GradReduce,
    QuantizedGather,
    ReduceContext,
    StepContext,
    gather_ops,
    quantized_gather,
)
from hpcsgd.core.topology import Topology
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.traits import GradReduceTraits, ScheduleTraits
from hpcsgd.core.waits import in_turns
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import Mean, MeanOfAll, WithDistance, set_to_average
from hpcsgd.parts.grad_reduces.by_torch import left_to_torch

log = logging.getLogger(__name__)

FIRST_LR_DECAY = "first lr decay"


class Switch:
    """Whose turn it is. The last step of `first` ends with the plain mean, or what its server has: `then`
    starts from one model."""

    def __init__(self, first: Method, then: Method, at: int | str) -> None:
        self.first, self.then, self.at = first, then, at
        self.over = at == 0
        self.last = False
        """Whether this is the last step of `first`."""
        self.due = False
        """Whether groups meet after this step as those of the one whose turn it is."""
        self.lr = 0.0

    @property
    def sequence(self) -> tuple[tuple[int | None, Method], ...]:
        """Each method with its last step; `first` has none if there is no step of it."""
        if self.at == 0:
            return ((None, self.then),)
        return ((self.at if isinstance(self.at, int) else None, self.first), (None, self.then))

    @property
    def method(self) -> Method:
        return self.then if self.over else self.first

    @property
    def changes(self) -> bool:
        """Whether the groups are about to become one model for `then`."""
        return self.last and not self.over

    def look(self, s: StepContext) -> None:
        decayed, self.lr = s.lr < self.lr, s.lr
        self.last = not self.over and (decayed if self.at == FIRST_LR_DECAY else s.t == self.at)


class SwitchedGradReduce:
    """The exchange of whoever's turn it is."""

    def __init__(self, turn: Switch, first: GradReduce, then: GradReduce) -> None:
        self._turn, self._first, self._then = turn, first, then
        keeps = first.traits.keeps_gradients or then.traits.keeps_gradients
        self._traits = [
            replace(each.traits, per_bucket=False, keeps_gradients=keeps) for each in (first, then)
        ]
        self._beside: QuantizedGather | None = None
        """Who took back the chunks of this step."""

    @property
    def _exchange(self) -> GradReduce:
        return self._then if self._turn.over else self._first

    @property
    def traits(self) -> GradReduceTraits:
        return self._traits[self._turn.over]

    def left_to_torch(self) -> GradReduce:
        return SwitchedGradReduce(self._turn, left_to_torch(self._first), left_to_torch(self._then))

    def idle(self, topology: Topology) -> bool:
        return self._first.idle(topology) and self._then.idle(topology)

    def __call__(self, d: ReduceContext, b: Bucket) -> Work | None:
        return self._exchange(d, b)

    @property
    def quantizes_gather(self) -> bool:
        return any(quantized_gather(exchange) for exchange in (self._first, self._then))

    def restore(self, s: StepContext) -> None:
        self._beside = quantized_gather(self._exchange)
        if self._beside is not None:
            self._beside.restore(s)

    def gather(self, s: StepContext) -> None:
        """In the last step of `first` as they are, so that nothing is kept that `then` does not know."""
        if self._beside is not None and not self._turn.last:
            self._beside.gather(s)
            return
        if s.topology.group_size > 1:
            for b in s.buckets:
                s.topology.intra_group.allgather(b.w, b.param_shard).wait()
        self.clear()

    def clear(self) -> None:
        if self._beside is not None:
            self._beside.clear()

    def gather_ops(self, m: ModelLayout) -> Iterable[CommOp]:
        return gather_ops(self._exchange, m)


class SwitchedSchedule:
    """The schedule of whoever's turn it is."""

    def __init__(self, turn: Switch) -> None:
        self._turn = turn

    def __call__(self, s: StepContext) -> bool:
        return self._turn.method.schedule(s)

    @property
    def traits(self) -> ScheduleTraits:
        """With the rate as it is now."""
        return ScheduleTraits(rate=self._turn.method.schedule.traits.rate)


class SwitchedAverager:
    """Meets as the one whose turn it is, and hands over in the last step of `first`. The averager of `first`
    acts there only if its schedule says so."""

    def __init__(self, turn: Switch) -> None:
        self._turn = turn
        first, then = turn.first.averager.traits, turn.then.averager.traits
        names = dict.fromkeys([*first.histogram_names, *then.histogram_names])
        self.sequence = turn.sequence
        waits = in_turns([(until, stage.waits) for until, stage in self.sequence])
        self.traits = Traits(waits, whole_model=first.whole_model, histogram_names=tuple(names))

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        turn = self._turn
        turn.look(s)
        if turn.last and s.topology.num_groups == 1:  # nobody to meet
            turn.over = True

    def is_due(self, s: StepContext, wanted: bool) -> bool:
        turn = self._turn
        turn.due = is_due(turn.method.averager, s, wanted)
        return turn.due or turn.last

    def begin(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        begin(self._turn.method.averager, vectors, s)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterable[Tensor]:
        turn = self._turn
        if not turn.changes:
            return turn.method.averager.average(vectors, s)
        found = list(vectors)
        finish(turn.first.averager, found, s, turn.due)
        self._to_one_model(found, s)
        turn.over = True
        return found

    def finish(self, vectors: Sequence[Tensor], s: StepContext, due: bool) -> None:
        if self._turn.changes:
            run_averager(self, vectors, s)
        else:
            finish(self._turn.method.averager, vectors, s, due)

    def _to_one_model(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Note the distance, unless `first` has noted that of its own meeting, or groups are never apart."""
        first = self._turn.first
        if first.model_holder() is not None:
            set_to_average(vectors, s, first.model_holder())
            return
        mean = MeanOfAll() if self.traits.whole_model else Mean()
        noted = self._turn.due or first.grad_reduce.traits.across
        run_averager(mean if noted else WithDistance(mean), vectors, s)

    @property
    def inner(self) -> Averager:
        return self._turn.method.averager

    @property
    def parts(self) -> Mapping[str, Method]:
        return {"first": self._turn.first, "then": self._turn.then}

    def state_dict(self) -> State:
        return State(replicated={"over": self._turn.over, "lr": self._turn.lr})

    def load_state_dict(self, state: State) -> None:
        self._turn.over, self._turn.lr = state.replicated["over"], state.replicated["lr"]


@method(cite="assran2019sgp")
@checked
def switch(first: Method, then: Method, at: int | Literal["first lr decay"]) -> Method:
    """One method first, and then another one.

    The last step of the first one ends with the plain mean of the groups' models, or with the model that its
    server has: the second starts from one model. The groups meet in the first one's own way before that only
    if they are due to. A meeting of `delayed` or `streaming` that is under way is taken in before the mean; a
    late message of `osgp` is dropped.

    Not to be confused with `post_local`, which is `bsp` and then `hierarchical`, by the learning rate.

    Args:
        first: until then. What a sparse exchange of it has kept is dropped at the change, which is warned of.
        then: from then on. Both update chunks, or both whole vectors (as `allreduce_local_sgd` and sparse
            exchanges do).
        at: a number of steps ≥ 0, or "first lr decay": up to and with the first step whose learning rate is
            lower than that of the one before. A job file may say ``at = { epoch = 30 }``, and ``first = {
            name = "bsp" }``.

    Raises:
        UserError: for another `at`, and for methods that do not go together.

    Example:
        >>> method = hpcsgd.switch(hpcsgd.bsp(), hpcsgd.sgp(), at=2)     # AR/1P-SGP
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=3)
        >>> optimizer.t
        3

    Source:
        M. Assran et al., ICML 2019, table 5 (AR/1P-SGP, 2P/1P-SGP).
    """
    if at != FIRST_LR_DECAY and (type(at) is not int or at < 0):
        raise UserError(
            f"at = {at!r}: expected a number of steps ≥ 0 or {FIRST_LR_DECAY!r}", key="at", value=at
        )
    if _updated_and_averaged(first) != _updated_and_averaged(then):
        raise UserError(
            "switch: one method updates chunks and the other one whole vectors, as allreduce_local_sgd and "
            "sparse exchanges do: both have to do the same"
        )
    if first.grad_reduce.traits.keeps_gradients:
        log.warning("switch: what the exchange of the first method has kept is dropped at the change")
    turn = Switch(first, then, at)
    exchange = SwitchedGradReduce(turn, first.grad_reduce, then.grad_reduce)
    return Method(grad_reduce=exchange, schedule=SwitchedSchedule(turn), averager=SwitchedAverager(turn))


def _updated_and_averaged(method: Method) -> tuple[bool, bool]:
    """Whether it updates chunks, and whether it averages whole models."""
    return method.grad_reduce.traits.shards, method.averager.traits.whole_model
