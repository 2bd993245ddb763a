"""The outer optimizer of DiLoCo and the model θ on which it steps, kept for a list of vectors.

    Δ ← θ − found,   θ ← OuterOpt(θ, Δ)

`found` is what an averager has made of the model. OuterOpt sees vectors and no parameters, so it must be
element-wise. For 16-bit vectors, θ and the optimizer's state are float32; Δ is measured from θ rounded to the
vectors' dtype, so that rounding errors do not count as movement.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

from hpcsgd.comm import accumulation_dtype
from hpcsgd.core.state import State
from hpcsgd.errors import UserError
from hpcsgd.parts.outer_schedules.base import OuterSchedule, set_outer_values

MakeOptimizer = Callable[[Sequence[Tensor]], optim.Optimizer]
NESTEROV: MakeOptimizer = partial(optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of DiLoCo's paper."""
OUTER_STATE = "outer "
"""The prefix of the outer optimizer's state tensors in the method's state."""


@dataclass(frozen=True)
class OuterMaker:
    """The function `make`, with the `options` of the optimizer that it makes, by which ranks are compared."""

    make: MakeOptimizer
    options: Mapping[str, Any]

    def __call__(self, vectors: Sequence[Tensor]) -> optim.Optimizer:
        return self.make(vectors)


class OuterStep:
    """θ and the optimizer that `make_optimizer` makes for it; `schedule` sets its rate and momentum.

    Raises `UserError` if `make_optimizer` does not make a torch optimizer, or `schedule` has a momentum and
    the optimizer has none.
    """

    def __init__(self, make_optimizer: MakeOptimizer, schedule: OuterSchedule | None = None) -> None:
        self._sample, options = _try_out(make_optimizer, schedule)
        self.make_optimizer, self.schedule = OuterMaker(make_optimizer, options), schedule
        self.theta: list[Tensor] = []
        """One tensor per vector; empty before `start`."""
        self._optimizer: optim.Optimizer | None = None
        self._saved = State()

    @property
    def started(self) -> bool:
        return self._optimizer is not None

    @property
    def tensors(self) -> int:
        """The number of tensors that are kept for each vector: θ and the optimizer's state."""
        return 1 + len(self._moments)

    @property
    def _moments(self) -> list[str]:
        """The names of the optimizer's state tensors that are like θ."""
        return [name for name, value in self._sample.items() if _is_like(value, SAMPLE)]

    def start(self, vectors: Sequence[Tensor]) -> None:
        """Let θ be the loaded one, or else a copy of `vectors`."""
        self.theta = [w.to(accumulation_dtype(w.dtype), copy=True) for w in vectors]
        self._optimizer = self.make_optimizer(self.theta)
        saved, self._saved = self._saved, State()
        for i, theta in enumerate(self.theta[: len(saved.sharded.get("theta", []))]):
            n = theta.numel()  # a saved vector may be padded
            theta.copy_(saved.sharded["theta"][i][:n])
            moments = {
                k.removeprefix(OUTER_STATE): v[i][:n].clone()
                for k, v in saved.sharded.items()
                if k.startswith(OUTER_STATE)
            }
            if state := copy.deepcopy(saved.replicated["rest"]) | moments:
                self._require_known(state)
                self._optimizer.state[theta] = state

    def set_values(self, t: int, P: int) -> dict[str, float]:
        """Set the rate and the momentum for step `t` of P groups; return them as metrics."""
        assert self._optimizer is not None
        if self.schedule is None:
            return {}
        values = self.schedule.at(t, P)
        set_outer_values(self._optimizer, values)
        reported = {"outer_lr": values.lr, "outer_momentum": values.momentum}
        return {name: x for name, x in reported.items() if x is not None}

    def step(self, found: Sequence[Tensor]) -> None:
        """Take the step of the outer optimizer whose gradient is θ minus `found`."""
        assert self._optimizer is not None
        for theta, w in zip(self.theta, found, strict=True):
            theta.grad = theta.to(w.dtype).to(theta.dtype) - w
        self._optimizer.step()
        for theta in self.theta:
            theta.grad = None

    def state_dict(self) -> State:
        if self._optimizer is None:
            return self._saved
        states = [dict(self._optimizer.state[theta]) for theta in self.theta]
        names = [name for name, value in states[0].items() if _is_like(value, self.theta[0])]
        moments = {f"{OUTER_STATE}{name}": [state.pop(name) for state in states] for name in names}
        # The remaining state, such as a step count, is the same for all vectors.
        return State(replicated={"rest": states[0]}, sharded={"theta": self.theta, **moments})

    def load_state_dict(self, state: State) -> None:
        """Store `state`; `start` loads it into θ and the optimizer."""
        self._saved, self._optimizer = state, None

    def shared(self) -> list[Tensor]:
        """Return θ and the optimizer's state: as many tensors, of the same shapes, in every group."""
        assert self._optimizer is not None
        states = [self._optimizer.state[theta] for theta in self.theta]
        moments = [
            state[name] if state else torch.zeros_like(theta)
            for name in self._moments
            for theta, state in zip(self.theta, states, strict=True)
        ]
        numbers = [float(states[0][name]) if states[0] else 0.0 for name in self._numbers]
        header = torch.tensor([bool(states[0]), *numbers], dtype=torch.float64, device="cpu")
        return [*self.theta, *moments, header]

    def adopt(self, shared: Sequence[Tensor]) -> None:
        """Go on from what another group's `shared` returned; θ must be there already."""
        assert self._optimizer is not None
        count, (stepped, *numbers) = len(self.theta), shared[-1].tolist()
        moments = shared[count:-1]
        self._optimizer.state.clear()
        for i, theta in enumerate(self.theta if stepped else ()):
            state = copy.deepcopy(self._sample)
            state |= {name: moments[j * count + i] for j, name in enumerate(self._moments)}
            for name, number in zip(self._numbers, numbers, strict=True):
                state[name] = number if not isinstance(state[name], Tensor) else state[name].fill_(number)
            self._optimizer.state[theta] = state

    @property
    def _numbers(self) -> list[str]:
        """The names of the optimizer's state that are numbers, such as a step count."""
        return [name for name, value in self._sample.items() if _is_number(value)]

    def _require_known(self, saved: Mapping[str, Any]) -> None:
        """Raise `UserError` if the `saved` state is of another kind of optimizer."""
        if missing := sorted(self._sample.keys() - saved.keys()):
            raise UserError(
                f"outer: the checkpoint has no {missing[0]} of {type(self._optimizer).__name__}, but "
                f"{', '.join(sorted(saved))}: continue with the outer optimizer that was saved",
                key="outer",
            )

    def require_shareable(self) -> None:
        """Raise `UserError` if the optimizer has state that `shared` cannot give to another group."""
        known = {*self._moments, *self._numbers}
        if other := [name for name, value in self._sample.items() if value is not None and name not in known]:
            raise UserError(
                f"outer: its state {other[0]!r} is neither a number nor a tensor of the shape of the model, "
                "so a group that returns cannot get it from the others: take SGD or Adam",
                key="outer",
            )


SAMPLE = torch.zeros(2, device="cpu")
"""The vector on which an outer optimizer is tried out."""


def _is_like(value: Any, theta: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == theta.shape


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)


def _try_out(
    make_optimizer: Callable[[Sequence[Tensor]], object], schedule: OuterSchedule | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state that the outer optimizer keeps for a tensor, with the values of `schedule`.

    The second result has the options of the optimizer.

    The trial also reports a wrong optimizer now, instead of at the first synchronization.
    """
    theta = SAMPLE.clone()
    made = make_optimizer([theta])
    if not isinstance(made, optim.Optimizer):
        raise UserError(f"outer: it makes a {type(made).__name__}, expected a torch optimizer")
    _require_useful(made, theta, schedule)
    options = {name: x for name, x in made.param_groups[0].items() if name != "params"}
    _require_elementwise(make_optimizer)
    theta.grad = torch.zeros_like(theta)
    made.step()
    if schedule is not None:
        for knot in schedule.knots or [0]:  # an SGD keeps no momentum while it is 0
            set_outer_values(made, schedule.at(knot, 2))
            made.step()
    return dict(made.state[theta]), options


def _require_useful(made: optim.Optimizer, theta: Tensor, schedule: OuterSchedule | None) -> None:
    """Raise `UserError` if `made` does not move `theta`, because it has other tensors or no finite rate."""
    if [id(x) for group in made.param_groups for x in group["params"]] != [id(theta)]:
        raise UserError(
            f"outer: its {type(made).__name__} has other tensors than those that it was given: expected a "
            "function such as lambda ws: torch.optim.SGD(ws, lr=0.7)",
            key="outer",
        )
    sets_lr = schedule is not None and schedule.at(0, 2).lr is not None
    for lr in () if sets_lr else (group["lr"] for group in made.param_groups if "lr" in group):
        if not 0 < float(lr) < math.inf:
            raise UserError(
                f"outer: its {type(made).__name__} has lr = {float(lr):g}: expected a finite rate > 0: "
                "groups would lose what they have learned",
                key="outer",
            )


def _require_elementwise(make_optimizer: Callable[[Sequence[Tensor]], Any]) -> None:
    """Raise `UserError` if the steps of an element depend on the values and gradients of others."""
    found: set[float] = set()
    for other in (1.0, 1000.0):
        theta = torch.tensor([1.0, other], device="cpu")
        made = make_optimizer([theta])
        kind = type(made).__name__
        for gradient in ([1.0, other], [0.5, 1 / other]):
            theta.grad = torch.tensor(gradient, device="cpu")
            try:
                made.step()
            except Exception as error:
                raise UserError(f"outer: step() of its {kind} fails: {error}", key="outer") from error
        found.add(theta[0].item())
    if len(found) > 1:
        raise UserError(
            f"outer: its {kind} does not update each element separately, so its steps would depend on how "
            "the model is divided among ranks: take one such as SGD or Adam",
            key="outer",
        )
