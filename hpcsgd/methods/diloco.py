"""DiLoCo: the average movement of the groups is the gradient of a separate outer optimizer.

A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023
(arXiv:2311.08105), algorithm 1, with k workers and the common model θ:

    3-10   from θ(t−1) every worker i takes H steps of the inner optimizer, to θ_i
    12     Δ ← (1/k) Σ_i (θ(t−1) − θ_i)
    14     θ(t) ← OuterOpt(θ(t−1), Δ)

with AdamW inside and Nesterov momentum outside (rate 0.7, momentum 0.9).

Differences from the paper:

- The paper's worker is a group here. Each rank keeps θ(t−1) and the outer optimizer's state of the shard that
  it owns: M/K elements per tensor.
- Any optimizer can be the inner one. As in the paper, each group keeps its own inner optimizer state.
- OuterOpt can be combined with any averager. Then Δ is θ(t−1) − θ', where θ' is the averager's result. If the
  averager leaves the groups with different models, as gossip does, every group has its own θ.
- OuterOpt sees one vector per bucket and no parameters, so it must be element-wise.
- For 16-bit parameters, θ and the outer optimizer's state are float32. Δ is measured from θ rounded to the
  parameters' dtype, so that rounding errors do not count as movement.
- With `quantize`, groups send Δ in fewer bits, like the 4-bit outer gradients of Streaming DiLoCo
  (arXiv:2501.18512). That paper uses floats without error feedback; here the values are whole numbers with a
  scale.
- With `outer_schedule`, the rate and the momentum of OuterOpt change during the run.
- With `merge`, the mean of line 12 is a radial-directional one, as in Decoupled DiLoCo (arXiv:2604.21428).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.core.averager import Averager, run_averager
from hpcsgd.core.method import Method
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import (
    NESTEROV,
    MakeOptimizer,
    OuterStep,
    PseudoGradientPenalty,
    RadialDirectional,
    RadialDirectionalMean,
    WithDistance,
    WithOptimizerState,
    guarded,
    keep_state,
    mean_by,
    require_alone,
)
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.outer_schedules.base import OuterSchedule, require_useful
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.schedules import Every

PAPER = """
@misc{douillard2023diloco,
  title = {{DiLoCo}: Distributed Low-Communication Training of Language Models},
  author = {Douillard, Arthur and Feng, Qixuan and Rusu, Andrei A. and Chhaparia, Rachita and Donchev, Yani
  and Kuncoro, Adhiguna and Ranzato, Marc'Aurelio and Szlam, Arthur and Shen, Jiajun}, year = {2023},
  eprint = {2311.08105},
  archivePrefix = {arXiv},
}
"""


class OuterOptimizer:
    """The averager `inner`, followed by a step of the outer optimizer on θ.

    θ is the group's model after the last synchronization, or before its first update. The gradient of the
    outer step is θ minus the result of `inner`.
    """

    def __init__(
        self,
        inner: Averager,
        make_optimizer: MakeOptimizer,
        moved_on: Callable[[Sequence[Tensor]], None],
        schedule: OuterSchedule | None = None,
    ) -> None:
        """Store the arguments, and try out `make_optimizer`, which makes the outer optimizer.

        `moved_on` is called with the group's model after each outer step. All groups pass the same model if
        `inner` leaves them with the same one. `schedule` sets the rate and the momentum before each step.
        """
        self.outer = OuterStep(make_optimizer, schedule)
        # By these, ranks are compared.
        self.make_optimizer, self.schedule = self.outer.make_optimizer, schedule
        self.inner, self._moved_on = inner, moved_on
        self.traits = replace(inner.traits, leaves_mean=False, mean_of="")

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.topology.num_groups > 1 and not self.outer.started:
            self.outer.start(vectors)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = run_averager(self.inner, vectors, s)
        if len(s.left_out) == s.topology.num_groups:  # all groups have θ again: there is no movement
            return found
        s.metrics |= self.outer.set_values(s.t, s.topology.num_groups)
        self.outer.step(found)
        for theta, w in zip(self.outer.theta, found, strict=True):
            w.copy_(theta)
        self._moved_on(found)
        return found

    def observe(self, common: Sequence[Tensor]) -> None:
        """Let the outer optimizer see how θ has moved to `common`, the model of all groups, and follow it.

        Its state changes as in an outer step, by its own rate and momentum; θ becomes `common`.
        """
        self.outer.step(common)
        for theta, w in zip(self.outer.theta, common, strict=True):
            theta.copy_(w)

    def memory_bytes(self, m: ModelLayout) -> float:
        chunks = m.sharded or not self.traits.whole_model
        return self.outer.tensors * m.own_elements(wide=True) * (1 if chunks else m.K)

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return [replace(x, bucket=None) for x in comm_ops(self.inner, m)]  # the outer step needs all buckets

    def state_dict(self) -> State:
        return self.outer.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Store `state`; `prepare` loads it into θ and the outer optimizer at the next step."""
        self.outer.load_state_dict(state)


@method(cite=PAPER, delayable=True)
@checked
def diloco(
    sync_every: int,
    outer: MakeOptimizer = NESTEROV,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
    quantize: Quantizer | None = None,
    guard: PseudoGradientPenalty | None = None,
    outer_schedule: OuterSchedule | None = None,
    merge: RadialDirectional | None = None,
) -> Method:
    """Return DiLoCo: local SGD with an outer optimizer, whose gradient is the groups' mean movement.

    With ``outer=SGD(lr=1)`` it is `hierarchical`: a synchronization leaves every group with the mean.

    Args:
        sync_every: Steps between two synchronizations (the paper's H), at least 1. The paper uses 500.
        outer: Function that makes the outer optimizer from a list of tensors, one per bucket. The optimizer
            must be element-wise. In a job file: ``outer = { name = "SGD", lr = 0.7, momentum = 0.9, nesterov
            = true }``. Default the same, which is the paper's.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        optimizer_state: What happens to the inner optimizer's state at a synchronization: `keep_state`,
            `AverageState` or `ResetState`. Default keep_state, as in the paper.
        quantize: Format in which shards travel at a synchronization, such as `quantizers.bf16()`,
            `quantizers.int8()` or `quantizers.int4()`. Default None: their own dtype.
        guard: What protects the mean from groups whose changes are outliers: `PseudoGradientPenalty()`.
            Default None: the plain mean.
        outer_schedule: Rate and momentum of the outer optimizer over the run, such as
            `outer_schedules.piecewise(...)` or `outer_schedules.muloco()`. Default None: those of `outer`.
        merge: How the groups' movements become one, if not by their mean: `RadialDirectional()`, without
            `quantize` and `guard`. Default None: the mean.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If `sync_every` is below 1, `outer` does not make an element-wise torch optimizer of the
            given tensors with a rate above 0, or `outer_schedule` has a momentum and that optimizer has none,
            or a rate of 0 at the first synchronization; or `merge` is combined with `quantize` or `guard`.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends 2·(P−1)/P·M/K elements per
        synchronization. It keeps θ, the model after the last synchronization, and each state tensor of the
        outer optimizer, M/K elements each.

    Note:
        After a synchronization, `optimizer.metrics["distance"]` is the model distance before the outer step.
        With `outer_schedule`, "outer_lr" and "outer_momentum" are the values of that step.

    Example:
        >>> method = hpcsgd.diloco(sync_every=2, outer=lambda ws: torch.optim.SGD(ws, lr=0.7, momentum=0.9))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["distance"] > 0
        True

    References:
        A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023
        (arXiv:2311.08105), algorithm 1.

    See Also:
        `streaming`: averages one fragment of the model after the other.
    """
    if outer_schedule is not None:
        require_useful(outer_schedule, sync_every)
    if merge is None:
        mean = guarded(mean_by(quantize), guard)
    else:
        require_alone(quantize=quantize, guard=guard)
        mean = RadialDirectionalMean(merge)
    how = OuterOptimizer(WithDistance(mean), outer, mean.set_reference, outer_schedule)
    return Method(grad_reduce=grad_reduce, schedule=Every(sync_every), averager=optimizer_state(how))
