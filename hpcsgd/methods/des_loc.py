"""DES-LOC: the groups average parameters and each kind of optimizer state, each at its own interval.

A. Iacob et al.: DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models, 2025
(arXiv:2505.22549). Groups train with Adam or a similar optimizer, which keeps a first moment u and a second
moment v of the parameters x. With periods K_x, K_u and K_v

    x ← mean over the groups of x    if the number t of the update is a multiple of K_x
    u ← mean over the groups of u    if t is a multiple of K_u
    v ← mean over the groups of v    if t is a multiple of K_v

The influence of an old gradient on a moment with decay β halves in ln 0.5 / ln β steps. The second moment has
the larger β and changes more slowly. The paper advises K_u = 3·K_x and K_v = 6·K_x. A rank then sends 1 + 1/3
+ 1/6 times as much as for the parameters alone, instead of 3 times as much.

Differences from the paper:

- The paper's worker is a group here, and each rank averages what it owns of the optimizer state.
- The paper averages before an update. We average after the previous update, which is the same.
- The intervals need not be multiples of each other. If only optimizer state is averaged after a step, groups
  send each other no parameters, and a group gathers its own parameters as after any step.
- State that is one number per parameter, such as Adam's step count, is averaged whenever any other state is.
  The step counts differ if groups have not updated the same parameters, and Adam divides by values that
  depend on them.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.core.averager import Averager, Traits, run_averager
from hpcsgd.core.method import Method
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import Unknown
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import WithDistance, mean_by
from hpcsgd.parts.averagers.optimizer_state import average_states, comparison, sent_by_number, sent_by_state
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.schedules import Every

PAPER = r"""
@misc{iacob2025desloc,
  title = {{DES-LOC}: Desynced Low Communication Adaptive Optimizers for Training Foundation Models},
  author = {Iacob, Alex and Sani, Lorenzo and Safaryan, Mher and Giampouras, Paris and Horv{\'a}th, Samuel and
  others}, year = {2025},
  eprint = {2505.22549},
  archivePrefix = {arXiv},
}
"""

log = logging.getLogger(__name__)

FIRST = ("exp_avg", "momentum_buffer")
"""The names that torch's optimizers give to the first moment."""
SECOND = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg")
"""The names that torch's optimizers give to the second moment."""
OWN_THREAD = (
    "optimizer state is averaged between two synchronizations of the parameters, after steps that depend on "
    "the optimizer: choose intervals that are multiples of sync_every"
)


@dataclass(frozen=True)
class Periods:
    """The intervals, in steps, at which optimizer state is averaged.

    `first` and `second` are for all state of the first and the second moment; `named` has intervals for
    single state names, which take precedence.
    """

    first: int
    second: int
    named: Mapping[str, int]
    wanted: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    """The state names of each kind of moment for which the user gave an interval, by argument name."""

    def of(self, name: str) -> int | None:
        """Return the interval, in steps, for the state called `name`; None if it is never averaged."""
        by_kind = dict.fromkeys(FIRST, self.first) | dict.fromkeys(SECOND, self.second)
        return {**by_kind, **self.named}.get(name)

    def any_due(self, t: int) -> bool:
        return any(t % period == 0 for period in self._all)

    def are_multiples_of(self, every: int) -> bool:
        return all(period % every == 0 for period in self._all)

    @property
    def _all(self) -> tuple[int, ...]:
        return (self.first, self.second, *self.named.values())


@dataclass
class Desynced:
    """The averager `inner` for parameters, with averages of each kind of optimizer state at its interval."""

    inner: Averager
    every: int
    periods: Periods
    traits: Traits = field(init=False, repr=False)
    _checked: bool = field(default=False, init=False, compare=False)

    def __post_init__(self) -> None:
        inner = self.inner.traits
        waits = inner.waits if self.periods.are_multiples_of(self.every) else Unknown(OWN_THREAD)
        self.traits = replace(inner, waits=waits, leaves_mean=False, vectors_only=False)

    def is_due(self, s: StepContext, wanted: bool) -> bool:
        return wanted

    def begin(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        """Average the optimizer state that is due after an update at which parameters are not averaged."""
        self._average_due(s)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> Iterator[Tensor]:
        yield from self.inner.average(vectors, s)
        self._average_due(s)

    def finish(self, vectors: Sequence[Tensor], s: StepContext, due: bool) -> None:
        if due:
            run_averager(self, vectors, s)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the operations of a synchronization and of the state averages up to the next one."""
        yield from comm_ops(self.inner, m)
        periods = {
            name: period for name in m.optimizer_state if (period := self.periods.of(name)) is not None
        }
        often = share_of_steps(list(periods.values())) * self.every
        if often:
            yield replace(comparison(), times=often)
        for name, period in periods.items():
            sent = sent_by_state(m, m.optimizer_state[name], not self.traits.whole_model)
            yield from (replace(x, times=self.every / period) for x in sent)
        if often:
            for layers in m.numbers.values():
                yield replace(sent_by_number(m, layers, not self.traits.whole_model), times=often)

    def _average_due(self, s: StepContext) -> None:
        if not self._checked:
            self._require_known(s)
        if not self.periods.any_due(s.t):
            return
        named = s.optimizer_state.tensors()
        due = {name for name in named if (period := self.periods.of(name)) and s.t % period == 0}
        if due:
            average_states({k: xs for k, xs in named.items() if k in due or self._is_number(k, xs)}, s)

    def _is_number(self, name: str, tensors: Sequence[Tensor]) -> bool:
        return self.periods.of(name) is None and all(x.dim() == 0 for x in tensors)

    def _require_known(self, s: StepContext) -> None:
        """Check, after the first update, that the optimizer has the state for which the user gave intervals.

        Raise `UserError` for a name that it does not have, and warn about a missing kind of moment. By then
        an optimizer has all of its state. A single rank may lack some, because it owns no parameter with
        this state, so the ranks gather the names. Collective.
        """
        self._checked = True
        if not (self.periods.named or self.periods.wanted):
            return
        who = type(s.optimizer_state.optimizer).__name__
        has = {
            name
            for names in s.topology.world.gather_objects(list(s.optimizer_state.tensors()))
            for name in names
        }
        for name in self.periods.named:
            if name not in has:
                raise UserError(
                    f"optimizer_state: {who} has no {name}; it has {', '.join(sorted(has)) or 'none'}"
                )
        for kind, names in self.periods.wanted.items():
            if s.topology.rank == 0 and has.isdisjoint(names):
                ordinal = kind.removesuffix("_every")
                log.warning("des_loc: %s is ignored: %s keeps no %s moment", kind, who, ordinal)


def share_of_steps(periods: Sequence[int]) -> float:
    """Return the fraction of steps that are a multiple of any of `periods`."""
    different = set(periods)
    return sum(
        (-1) ** (n + 1) / math.lcm(*some)
        for n in range(1, len(different) + 1)
        for some in itertools.combinations(different, n)
    )


@method(cite=PAPER)
@checked
def des_loc(
    sync_every: int,
    first_every: int | None = None,
    second_every: int | None = None,
    optimizer_state: Mapping[str, int] | None = None,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    quantize: Quantizer | None = None,
) -> Method:
    """Return local SGD that also averages optimizer state, less often than parameters and by kind.

    Args:
        sync_every: Steps between two synchronizations of the parameters (K_x), at least 1.
        first_every: Steps between averages of the first moment (K_u): exp_avg of Adam and similar optimizers,
            momentum_buffer of SGD, RMSprop and Muon. Default None: 3·K_x, as the paper advises, if the
            optimizer has them.
        second_every: Steps between averages of the second moment (K_v): exp_avg_sq and max_exp_avg_sq,
            Adamax's exp_inf, RMSprop's square_avg. Default None: 6·K_x.
        optimizer_state: Intervals by the optimizer's own state names, for other state or instead of the two
            above. In a job file: ``optimizer_state = { exp_avg_sq = 40 }``. State without an interval is
            never averaged. Default None: none.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        quantize: Format in which shards of parameters travel, such as `quantizers.int8()`. Optimizer state is
            never quantized. Default None: their own dtype.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it may hold state.

    Raises:
        UserError: If an interval is below 1; after the first update, if the optimizer does not have a name in
            `optimizer_state`. A `first_every` or `second_every` for a moment that the optimizer does not keep
            causes only a warning.

    Shape:
        M parameters in total; each rank owns M/K of them. A rank sends 2·(P−1)/P·M/K elements for the
        parameters every K_x steps. For each state tensor it sends the same number every K_u or K_v steps.

    Note:
        After a synchronization of parameters, `optimizer.metrics["distance"]` is the model distance.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> method = hpcsgd.des_loc(sync_every=2, second_every=4)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["distance"] > 0
        True

    References:
        A. Iacob et al.: DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
        Models, 2025 (arXiv:2505.22549).

    See Also:
        `AverageState`: averages the state together with the parameters.
    """
    when, named = Every(sync_every), dict(optimizer_state or {})
    given = {"first_every": (first_every, FIRST), "second_every": (second_every, SECOND)}
    periods = Periods(
        3 * sync_every if first_every is None else first_every,
        6 * sync_every if second_every is None else second_every,
        named,
        {kind: names for kind, (period, names) in given.items() if period is not None},
    )
    for name, period in {"first_every": periods.first, "second_every": periods.second, **named}.items():
        if type(period) is not int or period < 1:
            raise UserError(
                f"{name} = {period!r}: expected a number of steps ≥ 1",
                key=name,
                value=period,
            )
    return Method(
        grad_reduce=grad_reduce,
        schedule=when,
        averager=Desynced(WithDistance(mean_by(quantize)), sync_every, periods),
    )
