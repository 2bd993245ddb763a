"""DiLoCo: what groups agree on is a gradient for an optimizer of its own.

A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023
(arXiv:2311.08105), algorithm 1:

    3-10   from θ(t−1) every worker i takes H steps of the inner optimizer, to θ_i
    12     Δ ← (1/k) Σ_i (θ(t−1) − θ_i)
    14     θ(t) ← OuterOpt(θ(t−1), Δ)

with AdamW inside and Nesterov momentum outside (rate 0.7, momentum 0.9).

Differences from the paper: its worker is a group here, and each position keeps the outer optimizer's state of
the chunk it owns, M/K for every state tensor, and θ(t−1) besides. The inner optimizer is any. OuterOpt goes
around any averager: Δ is θ(t−1) − θ', θ' being what the averager makes of the groups' models; where it leaves
them apart, as gossip does, every group has a θ of its own. It sees one vector for every bucket and no
parameters, so that it has to be element-wise; of 16-bit parameters θ and its state are float32, and Δ counts
from θ as it was rounded to them, since rounding is no movement. The inner
moments stay the groups' own, as in the paper. With `quantize` they send how they moved, Δ, in as few bits as
one likes: the outer gradients of 4 bits of Streaming DiLoCo (arXiv:2501.18512), whose floats are whole
numbers with a scale here, and which has no error feedback.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

from hpcsgd.arguments import checked
from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.averager import Averager, run_averager
from hpcsgd.core.method import Method
from hpcsgd.core.optional import comm_ops
from hpcsgd.core.state import State
from hpcsgd.core.step import GradReduce, StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import WithDistance, WithOptimizerState, keep_state, mean_by
from hpcsgd.parts.grad_reduces import Dense
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

MakeOptimizer = Callable[[Sequence[Tensor]], optim.Optimizer]
NESTEROV: MakeOptimizer = partial(optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The paper's choice."""
OUTER_STATE = "outer "
"""Begins the names of the outer optimizer's moments in the state."""


class OuterOptimizer:
    """`inner`, and a step of the optimizer that `make_optimizer` makes, from θ by θ − what `inner` led to.

    θ is what the group had after the last meeting, or before its first update.
    """

    def __init__(
        self, inner: Averager, make_optimizer: MakeOptimizer, moved_on: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """`moved_on` is told what the group has after each step, alike in all groups where `inner` leaves
        them alike."""
        self._state = _try_out(make_optimizer)
        self.inner, self._moved_on = inner, moved_on
        self.make_optimizer = make_optimizer
        self.traits = replace(inner.traits, leaves_mean=False)
        self._theta: list[Tensor] = []
        self._optimizer: optim.Optimizer | None = None
        self._saved = State()

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        if s.topology.num_groups > 1 and self._optimizer is None:
            self._start(vectors)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        assert self._optimizer is not None
        found = run_averager(self.inner, vectors, s)
        for theta, w in zip(self._theta, found, strict=True):
            theta.grad = theta.to(w.dtype).to(theta.dtype) - w
        self._optimizer.step()
        for theta, w in zip(self._theta, found, strict=True):
            w.copy_(theta)
            theta.grad = None
        self._moved_on(found)
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        chunks = m.sharded or not self.traits.whole_model
        return (1 + self._state) * m.own_elements(wide=True) * (1 if chunks else m.K)

    def comm_ops(self, m: ModelLayout) -> list[CommOp]:
        return [replace(x, bucket=None) for x in comm_ops(self.inner, m)]  # it moves w when all are there

    def state_dict(self) -> State:
        if self._optimizer is None:
            return self._saved
        states = [dict(self._optimizer.state[theta]) for theta in self._theta]
        names = [name for name, value in states[0].items() if _is_like(value, self._theta[0])]
        moments = {f"{OUTER_STATE}{name}": [state.pop(name) for state in states] for name in names}
        # All have stepped as often.
        return State(replicated={"rest": states[0]}, sharded={"theta": self._theta, **moments})

    def load_state_dict(self, state: State) -> None:
        """It counts from the next step on."""
        self._saved, self._optimizer = state, None

    def _start(self, mine: Sequence[Tensor]) -> None:
        self._theta = [w.to(accumulation_dtype(w.dtype), copy=True) for w in mine]
        self._optimizer = self.make_optimizer(self._theta)
        saved, self._saved = self._saved, State()
        for i, theta in enumerate(self._theta[: len(saved.sharded.get("theta", []))]):
            theta.copy_(saved.sharded["theta"][i])
            moments = {
                k.removeprefix(OUTER_STATE): v[i]
                for k, v in saved.sharded.items()
                if k.startswith(OUTER_STATE)
            }
            if state := copy.deepcopy(saved.replicated["rest"]) | moments:
                self._optimizer.state[theta] = state


def _is_like(value: Any, theta: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == theta.shape


def _try_out(make_optimizer: Callable[[Sequence[Tensor]], object]) -> int:
    """How many moments it keeps. What is wrong with an optimizer shows now, and not at the first meeting."""
    theta = torch.zeros(2, device="cpu")
    made = make_optimizer([theta])
    if not isinstance(made, optim.Optimizer):
        raise UserError(f"outer: it makes a {type(made).__name__}, expected a torch optimizer")
    theta.grad = torch.zeros_like(theta)
    made.step()
    return sum(_is_like(value, theta) for value in made.state[theta].values())


@method(cite=PAPER, delayable=True)
@checked
def diloco(
    sync_every: int,
    outer: MakeOptimizer = NESTEROV,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    optimizer_state: WithOptimizerState = keep_state,
    quantize: Quantizer | None = None,
) -> Method:
    """Local SGD with an optimizer of its own for meetings: the mean of what the groups moved is its gradient.

    A rank keeps the model of the last meeting and the outer optimizer's state, M/K elements each, and sends
    2·(P−1)/P·M/K at a meeting. Noted there: `distance`, before the outer step.

    Not to be confused with `hierarchical`, which is this with ``outer=SGD(lr=1)``: groups leave a meeting
    with their mean.

    Args:
        sync_every: H, steps from one meeting to the next, at least 1; the paper's are 500.
        outer: makes the outer optimizer of a list of tensors, one for each bucket; it must be element-wise.
            In a job file ``outer = { name = "SGD", lr = 0.7, momentum = 0.9, nesterov = true }``. Default
            that, the paper's Nesterov momentum.
        grad_reduce: of gradients inside a group: `Dense()`, `AllToAll()`, `ReduceScatter()` or `Sparse(...)`.
            Default Dense().
        optimizer_state: what becomes of the inner optimizer's momentum at a meeting: `keep_state`,
            `AverageState` or `ResetState`. Default keep_state, as in the paper.
        quantize: how chunks travel at a meeting: `quantizers.bf16()`, `quantizers.int8()`,
            `quantizers.int4()`, …. Default None: as they are.

    Raises:
        UserError: for `sync_every` below 1, or an `outer` that makes no torch optimizer.

    Example:
        >>> method = hpcsgd.diloco(sync_every=2, outer=lambda ws: torch.optim.SGD(ws, lr=0.7, momentum=0.9))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["distance"] > 0
        True

    Source:
        A. Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023
        (arXiv:2311.08105), algorithm 1.
    """
    mean = mean_by(quantize)
    how = OuterOptimizer(WithDistance(mean), outer, mean.set_reference)
    return Method(grad_reduce=grad_reduce, schedule=Every(sync_every), averager=optimizer_state(how))
