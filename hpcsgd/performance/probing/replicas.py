"""P virtual groups of K virtual ranks each, which any number of real ranks train in turn.

A group is one local model with batches of B samples: its K members give it K gradients of B/K samples each.
So P models on n ranks, trained in turn, do the same training as P·K real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn, optim

from hpcsgd.comm import Communicator
from hpcsgd.core.buffers import is_averaged
from hpcsgd.core.elements import as_reals
from hpcsgd.core.generators import generators_state, load_generators_state
from hpcsgd.core.norm import norm
from hpcsgd.engine.precision import Precision
from hpcsgd.errors import UserError
from hpcsgd.performance.probing.idle import IN_MEMORY, Offload

Batches = Iterator[tuple[Tensor, Tensor]]


class DivergedError(UserError):
    """The error for a loss or a distance that is not finite."""


@dataclass
class VirtualRank:
    """One virtual rank: its batches and the state of its random numbers (dropout, augmentation)."""

    batches: Batches
    chance: dict[str, Any]


@dataclass
class Trainee:
    """One virtual group: its model, its optimizer, and its K members by shard index."""

    model: nn.Module
    optimizer: optim.Optimizer
    members: Sequence[VirtualRank]
    after_update: Callable[[], None] = field(default=lambda: None)
    """A function to call after each update, for a learning-rate scheduler."""
    precision: Precision = field(default_factory=Precision)
    """The precision of this group alone, so that other groups still update if its gradients overflow."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that an `Offload` stores: parameters, buffers and optimizer state."""
        yield from chain(self.model.parameters(), self.model.buffers())
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@dataclass(frozen=True)
class Chance:
    """Functions that read and set the random state of the process, which virtual ranks use in turn."""

    read: Callable[[], dict[str, Any]]
    set: Callable[[dict[str, Any]], None]

    @classmethod
    def on(cls, device: torch.device) -> Chance:
        """Return the functions for the random state of the process and of `device`."""
        return cls(partial(generators_state, device), partial(load_generators_state, device=device))


class VirtualGroups:
    """P virtual groups, of which each rank trains some. All methods are collective.

    `trainees`: the groups that this rank trains, at least one. The models may be on any device, but sums over
    ranks are made on the host.
    """

    def __init__(
        self,
        trainees: Sequence[Trainee],
        P: int,
        world: Communicator,
        loss: Callable[[Tensor, Tensor], Tensor],
        chance: Chance,
        held_out: tuple[Tensor, Tensor],
        idle: Offload = IN_MEMORY,
    ) -> None:
        self.trainees = trainees
        self.P = P
        self._held_out = held_out
        self._world = world
        self._loss = loss
        self._chance = chance
        self._offload = idle
        for i, trainee in enumerate(trainees):
            idle.put(i, trainee.tensors())

    def start_from(self, state: Mapping[str, Tensor]) -> None:
        """Load the parameters and buffers in `state` into all models."""
        for trainee in self._each(changed=True):
            trainee.model.load_state_dict(state)

    def train(self, steps: int) -> float:
        """Train every group for `steps` steps, one group after the other, and return the mean loss.

        Raises `DivergedError` if the loss is not finite.
        """
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for trainee in self._each(changed=True):
            total += torch.stack([self._step(trainee) for _ in range(steps)]).sum().cpu()
        mean = self._sum(total).item() / (self.P * steps)
        return self._require_finite(mean, "loss")

    @torch.no_grad()
    def synchronize(self) -> float:
        """Average the models of all groups, and return D = (1/P) Σ_i ‖w_i − w̄‖₂ before that (eq. 9).

        One allreduce sums the models, another one the norms. Raises `DivergedError` if D is not finite.
        """
        mean = self._mean(lambda model: _flat(model.parameters()))

        def distance(model: nn.Module) -> Tensor:
            return norm(_flat(model.parameters()).sub_(mean))

        D = self._mean(distance).item()
        for trainee in self._each(changed=True):
            _set(trainee.model.parameters(), mean)
        return self._require_finite(D, "distance")

    def loss(self) -> float:
        """Return the averaged model's loss on held-out samples. Raises `DivergedError` if not finite."""
        with self.averaged() as model, self.trainees[0].precision.computing():
            x, y = self._held_out
            return self._require_finite(self._loss(model(x), y).item(), "loss of the averaged model")

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield the average of all models and their buffers, in evaluation mode, inside the block."""
        first = self.trainees[0]
        with torch.no_grad():
            mean = self._mean(lambda model: _flat(_floats(model)))
            with self._offload.awake(0, first.tensors, changed=False):
                own = _flat(_floats(first.model))
                _set(_floats(first.model), mean)
                first.model.eval()
                yield first.model
                first.model.train()
                _set(_floats(first.model), own)

    def _step(self, trainee: Trainee) -> Tensor:
        total = torch.zeros((), device="cpu")
        for member in trainee.members:
            self._chance.set(member.chance)
            x, y = next(member.batches)
            with trainee.precision.computing():
                loss = self._loss(trainee.model(x), y) / len(trainee.members)
            trainee.precision.backward(loss)
            total = total + loss.detach()
            member.chance = self._chance.read()
        made = trainee.precision.step(trainee.optimizer)
        trainee.optimizer.zero_grad()  # only the model in training keeps gradients
        if made:
            trainee.after_update()
        return total

    def _each(self, *, changed: bool) -> Iterator[Trainee]:
        for i, trainee in enumerate(self.trainees):
            with self._offload.awake(i, trainee.tensors, changed=changed):
                yield trainee

    def _mean(self, of: Callable[[nn.Module], Tensor]) -> Tensor:
        """Return the mean of `of(model)` over all groups."""
        total = None
        for trainee in self._each(changed=False):
            value = of(trainee.model)
            total = value if total is None else total.add_(value)
        assert total is not None
        return self._sum(total).div_(self.P)

    def _sum(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place, and return it."""
        host = x.cpu()
        self._world.allreduce(host).wait()
        return x.copy_(host)

    def _require_finite(self, value: float, what: str) -> float:
        if not torch.isfinite(torch.tensor(value, device="cpu")):
            groups = "one group" if self.P == 1 else f"{self.P} groups"
            raise DivergedError(f"the {what} with {groups} is {value}: try a lower learning rate")
        return value


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([as_reals(x.detach()).reshape(-1) for x in tensors])


def _floats(model: nn.Module) -> list[Tensor]:
    return [x for x in chain(model.parameters(), model.buffers()) if is_averaged(x)]


def _set(tensors: Iterable[Tensor], values: Tensor) -> None:
    start = 0
    for x in tensors:
        reals = as_reals(x.detach())
        reals.copy_(values[start : start + reals.numel()].view(reals.shape))
        start += reals.numel()
