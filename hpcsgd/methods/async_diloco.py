"""Asynchronous DiLoCo: groups send their movements to a server, which takes a delayed Nesterov step for each.

B. Liu, R. Chhaparia, A. Douillard, S. Kale, A. A. Rusu, J. Shen, A. Szlam, M. Ranzato: Asynchronous Local-SGD
Training for Language Modeling, 2024 (arXiv:2401.09135). We read code and summaries that cite the paper, not
the paper. A group reads the server's model θ, trains H steps to w, and sends the pseudo-gradient g = θ − w
for the θ that it has read. The server keeps the momentum m and a buffer Δ, both 0 at first. For its update
number t = 1, 2, … it does (delayed Nesterov)

    Δ ← Δ + g
    if t is a multiple of N:  m ← β·m + Δ/N,  θ ← θ − ε·((1 − c·N + c)·β·m + g/N),  Δ ← 0
    otherwise:                                θ ← θ − ε·(c·β·m + g/N)

and the group continues from the new θ without waiting for others. c in [0, 1/N] spreads the momentum over
the N updates. With c = 0, N updates together are one Nesterov step on the mean of their pseudo-gradients.
N = 1 is Nesterov in every update.

With dynamic local updates a group g of speed v_g trains H_g steps instead of H:

    H_g ← max(1, ⌊v_g / max_j v_j · H⌋)

Differences from the paper:

- The paper's worker is a group here. The server's model, momentum and buffer are distributed over all ranks,
  in host memory. Each rank applies the updates of its part in the order in which they arrive there.
- N is the number of groups unless `buffer_size` says otherwise. `momentum_spread` is c·N, from 0 to 1.
- The server answers each update at once. It does not wait for more updates that might arrive soon (section
  3.3).
- With `max_staleness`, groups wait for slow ones as in `ssp`. With 0 the training is that of DiLoCo
  to within rounding.
- For 16-bit parameters θ, m and Δ are float32, and g is measured from θ rounded to the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers.by_tensor import ByTensor
from hpcsgd.parts.averagers.message_buffer import MessageBuffer
from hpcsgd.parts.averagers.parameter_server import ParameterServer
from hpcsgd.parts.averagers.server_rule import ServerRates, ServerRule, require
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.outer_schedules.base import OuterSchedule, require_useful
from hpcsgd.parts.schedules import BySpeed, DynamicLocalSteps, Every

PAPER = """
@misc{liu2024asynchronous,
  title = {Asynchronous Local-{SGD} Training for Language Modeling},
  author = {Liu, Bo and Chhaparia, Rachita and Douillard, Arthur and Kale, Satyen and Rusu, Andrei A. and
  Shen, Jiajun and Szlam, Arthur and Ranzato, Marc'Aurelio}, year = {2024},
  eprint = {2401.09135},
  archivePrefix = {arXiv},
}
"""


class DelayedNesterov:
    """The server's rule: the momentum changes with every N-th update, θ with every one."""

    vectors_per_part = 3

    def __init__(self, rates: ServerRates, buffer_size: int | None, spread: float) -> None:
        """Store the rate ε and the momentum β, N (None: the number of groups) and `spread`, which is c·N."""
        self._rates, self._buffer_size, self._spread = rates, buffer_size, spread

    def begin(self, part: Sequence[Tensor], tensors: ByTensor, P: int) -> None:
        self.theta, self._P = part, P
        self.N = self._buffer_size or P
        self.m, self.delta, self._g = ([torch.zeros_like(x) for x in part] for _ in range(3))
        self.buffered = 0
        """The number of pseudo-gradients in Δ."""

    def apply(self, update: MessageBuffer, t: int) -> None:
        epsilon, beta = self._rates.at(t, self._P)
        update.unpack(self._g)
        self.buffered += 1
        full = self.buffered >= self.N
        c = self._spread / self.N
        share = 1 - self._spread + c if full else c
        for theta, m, delta, g in zip(self.theta, self.m, self.delta, self._g, strict=True):
            g.neg_()  # the update is w − θ
            delta.add_(g)
            if full:
                m.mul_(beta).add_(delta, alpha=1 / self.N)
                delta.zero_()
            theta.add_(g.div_(self.N).add_(m, alpha=share * beta), alpha=-epsilon)
        if full:
            self.buffered = 0

    def metrics(self, t: int) -> Mapping[str, float]:
        return self._rates.metrics(t, self._P)

    def vectors(self) -> Mapping[str, Sequence[Tensor]]:
        return {"momentum": self.m, "buffer": self.delta}

    def numbers(self) -> Mapping[str, Any]:
        return {"buffered": self.buffered, "buffer_size": self.N}

    def restore(self, vectors: Mapping[str, Sequence[Tensor]], numbers: Mapping[str, Any]) -> str:
        _copy(self.m, vectors["momentum"])
        if numbers["buffer_size"] != self.N and numbers["buffered"]:
            return (
                f"async_diloco: the buffer of the momentum starts anew: it is for {self.N} updates now, and "
                f"it was for {numbers['buffer_size']} and had {numbers['buffered']}"
            )
        _copy(self.delta, vectors["buffer"])
        self.buffered = numbers["buffered"]
        return ""


def _copy(to: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    for x, y in zip(to, saved, strict=True):
        x.copy_(y)


@method(cite=PAPER)
@checked
def async_diloco(
    sync_every: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    buffer_size: int | None = None,
    momentum_spread: float = 0.0,
    local_steps: DynamicLocalSteps | None = None,
    max_staleness: int | None = None,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    outer_schedule: OuterSchedule | None = None,
) -> Method:
    """Return asynchronous DiLoCo: DiLoCo with a parameter server on all ranks, where no group waits.

    The model is the server's: evaluate inside `optimizer.averaged_model()`. It has the groups' steps up to
    their last synchronizations.

    Args:
        sync_every: Steps of a group between two synchronizations (the paper's H), at least 1. The paper uses
            50. With `local_steps` these are the steps of the fastest group.
        outer_lr: The server's rate ε, above 0. One update has an N-th of it. Default 0.7.
        outer_momentum: The server's momentum β, ≥ 0 and below 1. Default 0.9.
        buffer_size: Updates after which the momentum changes (the paper's N), at least 1. Default None: the
            number of groups.
        momentum_spread: Share of the momentum that is spread over the N updates (the paper's c·N), 0 to 1.
            With 0 the N-th update has all of it. Default 0.0.
        local_steps: How the groups' numbers of steps follow from their speeds: `DynamicLocalSteps()`. Default
            None: every group takes `sync_every` steps.
        max_staleness: Synchronizations that a group may be ahead of the slowest one, 0 or more. Default None:
            no limit.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        outer_schedule: Rate and momentum of the server over the run, such as
            `outer_schedules.piecewise(...)`. The step is that of the group that sends the update. Default
            None: `outer_lr` and `outer_momentum`.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it holds state.

    Raises:
        UserError: If an argument is outside these bounds, `max_staleness` is given together with
            `local_steps`, or `outer_schedule` has a rate of 0 at the first synchronization.

    Shape:
        M parameters in total. A rank sends and receives (P−1)/P·M/K elements per synchronization for its own
        group, and as much again for its part of the server. It keeps θ, m, Δ and one pseudo-gradient of its
        part, M/(P·K) elements each, in host memory.

    Note:
        After a synchronization, `optimizer.metrics["staleness"]` counts the updates by other groups since
        this group's last read, and `optimizer.metrics["ahead"]` by how many updates the group is ahead of the
        slowest one. With `outer_schedule` there are "outer_lr" and "outer_momentum".

        Updates are applied in the order in which they arrive, so two runs do not give the same bits. Each
        group keeps its inner optimizer state. A checkpoint keeps the groups' models and what they have read.

    Example:
        >>> method = hpcsgd.async_diloco(sync_every=2)
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        >>> train(optimizer, steps=4)
        >>> optimizer.metrics["staleness"] >= 0
        True

    References:
        B. Liu et al.: Asynchronous Local-SGD Training for Language Modeling, 2024 (arXiv:2401.09135).

    See Also:
        `diloco`: all groups wait for each other.
        `async_sgd`: a server that adds the update of every step.
        `ensemble_sync`: for groups that die.
    """
    rates = ServerRates(outer_lr, outer_momentum, outer_schedule)
    require("buffer_size", buffer_size, buffer_size is None or buffer_size >= 1, "a number of updates ≥ 1")
    require("momentum_spread", momentum_spread, 0 <= momentum_spread <= 1, "a share from 0 to 1")
    rule = DelayedNesterov(rates, buffer_size, momentum_spread)
    return without_waiting(rule, rates, sync_every, local_steps, max_staleness, grad_reduce)


def without_waiting(
    rule: ServerRule,
    rates: ServerRates,
    sync_every: int,
    local_steps: DynamicLocalSteps | None,
    max_staleness: int | None,
    grad_reduce: GradReduce,
) -> Method:
    """Return the method whose groups send their changes to a parameter server with this `rule`.

    The other arguments are those of `async_diloco`.
    """
    every = Every(sync_every)
    if rates.schedule is not None:
        require_useful(rates.schedule, sync_every)
    if local_steps is None:
        return Method(grad_reduce, every, ParameterServer(max_staleness, rule))
    require(
        "max_staleness", max_staleness, max_staleness is None,
        "none with local_steps, because a fast group at its end would hold up slow ones for ever",
    )  # fmt: skip
    by_speed = BySpeed(sync_every, local_steps)
    return Method(grad_reduce, by_speed, ParameterServer(None, rule, by_speed))
