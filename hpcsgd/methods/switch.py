"""Training with one method and then another, such as AR/1P-SGP of the SGP paper (table 5)."""

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
    """The state of a change from the method `first` to the method `then`: which of the two trains now.

    The last step of `first` ends with the plain mean of the groups' models, or with the model that its
    parameter server holds. So `then` starts from one model. The parts of both methods share this object.
    """

    def __init__(self, first: Method, then: Method, at: int | str) -> None:
        self.first, self.then, self.at = first, then, at
        self.over = at == 0
        self.last = False
        """True if this is the last step of `first`."""
        self.due = False
        """True if the method that trains now synchronizes the groups after this step."""
        self.lr = 0.0

    @property
    def sequence(self) -> tuple[tuple[int | None, Method], ...]:
        """Both methods in order, each with the number of its last step, or None if it has none known.

        `first` is left out if it trains no step.
        """
        if self.at == 0:
            return ((None, self.then),)
        return ((self.at if isinstance(self.at, int) else None, self.first), (None, self.then))

    @property
    def method(self) -> Method:
        return self.then if self.over else self.first

    @property
    def changes(self) -> bool:
        """True if this is the last step of `first`, and the groups have not been set to one model yet."""
        return self.last and not self.over

    def look(self, s: StepContext) -> None:
        decayed, self.lr = s.lr < self.lr, s.lr
        # A resumed run may have another `at`, which is already past.
        self.last = not self.over and (s.t >= self.at if isinstance(self.at, int) else decayed)


class SwitchedGradReduce:
    """The gradient reduction of the method that trains now."""

    def __init__(self, turn: Switch, first: GradReduce, then: GradReduce) -> None:
        self._turn, self._first, self._then = turn, first, then
        keeps = first.traits.keeps_gradients or then.traits.keeps_gradients
        self._traits = [
            replace(each.traits, per_bucket=False, keeps_gradients=keeps) for each in (first, then)
        ]
        self._beside: QuantizedGather | None = None
        """The quantized gather that restored the exact shards in this step; None if there was none."""

    @property
    def _grad_reduce(self) -> GradReduce:
        return self._then if self._turn.over else self._first

    @property
    def traits(self) -> GradReduceTraits:
        return self._traits[self._turn.over]

    def left_to_torch(self) -> GradReduce:
        return SwitchedGradReduce(self._turn, left_to_torch(self._first), left_to_torch(self._then))

    def idle(self, topology: Topology) -> bool:
        return self._first.idle(topology) and self._then.idle(topology)

    def __call__(self, d: ReduceContext, b: Bucket) -> Work | None:
        return self._grad_reduce(d, b)

    @property
    def quantizes_gather(self) -> bool:
        return any(quantized_gather(grad_reduce) for grad_reduce in (self._first, self._then))

    def restore(self, s: StepContext) -> None:
        self._beside = quantized_gather(self._grad_reduce)
        if self._beside is not None:
            self._beside.restore(s)

    def gather(self, s: StepContext) -> None:
        """Gather the parameters of the group.

        In the last step of `first` they are gathered unquantized, so that no quantization error remains,
        which `then` would not know.
        """
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
        return gather_ops(self._grad_reduce, m)


class SwitchedSchedule:
    """The schedule of the method that trains now."""

    def __init__(self, turn: Switch) -> None:
        self._turn = turn

    def __call__(self, s: StepContext) -> bool:
        return self._turn.method.schedule(s)

    @property
    def traits(self) -> ScheduleTraits:
        """The traits of this schedule; `rate` is that of the method that trains now."""
        return ScheduleTraits(rate=self._turn.method.schedule.traits.rate)


class SwitchedAverager:
    """The averager of the method that trains now; it changes to `then` after the last step of `first`.

    In that step the averager of `first` acts only if its schedule says so.
    """

    def __init__(self, turn: Switch) -> None:
        self._turn = turn
        first, then = turn.first.averager.traits, turn.then.averager.traits
        names = dict.fromkeys([*first.histogram_names, *then.histogram_names])
        self.sequence = turn.sequence
        waits = in_turns([(until, stage.waits) for until, stage in self.sequence])
        self.traits = Traits(
            waits,
            whole_model=first.whole_model,
            mean_of="models" if first.mean_of and then.mean_of else "",
            histogram_names=tuple(names),
        )

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        turn = self._turn
        if s.in_step:
            turn.look(s)
        if turn.last and s.topology.num_groups == 1:  # no other group to average with
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
        """Set all groups to one model, from which `then` starts.

        Measure the model distance, unless `first` has just measured its own or its groups' models never
        differ.
        """
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
    """Return a method that trains with `first` and then with `then`.

    The last step of `first` ends with the plain mean of the groups' models, or with the model that its server
    holds. So `then` starts from one model. Before that mean:

    - The averager of `first` acts only if a synchronization is due.
    - A synchronization of `delayed` or `streaming` that is under way is finished and included.
    - A late message of `osgp` is dropped.

    Args:
        first: Method up to the change. The error feedback that its gradient reduction holds at the change is
            discarded, with a warning.
        then: Method after the change. Both methods must update shards, or both whole vectors, as
            `allreduce_local_sgd` and `Sparse` do.
        at: Last step of `first`, a number ≥ 0; or "first lr decay": `first` ends with the first step whose
            learning rate is lower than that of the previous step. In a job file: ``at = { epoch = 30 }``,
            and ``first = { name = "bsp" }``.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `at` is anything else, or the methods do not go together.

    Example:
        >>> method = hpcsgd.switch(hpcsgd.bsp(), hpcsgd.sgp(), at=2)     # AR/1P-SGP
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=3)
        >>> optimizer.t
        3

    References:
        M. Assran et al., ICML 2019, table 5 (AR/1P-SGP, 2P/1P-SGP).

    See Also:
        `post_local`: `bsp` and then `hierarchical`, at the first decay of the learning rate.
    """
    if at != FIRST_LR_DECAY and (type(at) is not int or at < 0):
        raise UserError(
            f"at = {at!r}: expected a number of steps ≥ 0 or {FIRST_LR_DECAY!r}", key="at", value=at
        )
    if _updated_and_averaged(first) != _updated_and_averaged(then):
        raise UserError(
            "switch: one method updates shards and the other one whole vectors, as allreduce_local_sgd and "
            "sparse gradient reductions do: both have to do the same"
        )
    if first.grad_reduce.traits.keeps_gradients:
        log.warning("switch: the error feedback of the first method is discarded at the change")
    turn = Switch(first, then, at)
    grad_reduce = SwitchedGradReduce(turn, first.grad_reduce, then.grad_reduce)
    return Method(grad_reduce=grad_reduce, schedule=SwitchedSchedule(turn), averager=SwitchedAverager(turn))


def _updated_and_averaged(method: Method) -> tuple[bool, bool]:
    """Return whether `method` updates shards, and whether it averages whole models."""
    return method.grad_reduce.traits.leaves_shards, method.averager.traits.whole_model
