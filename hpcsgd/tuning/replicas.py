"""P virtual groups of K ranks, hosted by however many real ranks there are.

A group is one local model that takes batches of B: K positions give it K gradients of B/K samples each. So P
models on n ranks, trained in turn, go through the very training that P·K ranks would do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from hpcsgd.errors import UserError
from hpcsgd.transport import Transport

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Member:
    """One virtual rank: its batches, and where its chance (dropout, augmentation) has come to."""

    batches: Batches
    chance: dict[str, Any]


@dataclass
class Trainee:
    """The local model of one virtual group, what trains it, and its K members in the order of positions."""

    model: nn.Module
    optimizer: optim.Optimizer
    members: Sequence[Member]
    after_update: Callable[[], None] = field(default=lambda: None)
    """What a learning-rate scheduler does after each update."""


@dataclass(frozen=True)
class Chance:
    """How to read and set the process-wide random numbers, which the virtual ranks share in turn."""

    read: Callable[[], dict[str, Any]]
    set: Callable[[dict[str, Any]], None]


class VirtualGroups:
    """`trainees` are those of the P groups that this rank hosts, at least one. Everything is collective."""

    def __init__(
        self,
        trainees: Sequence[Trainee],
        P: int,
        world: Transport,
        loss: Callable[[Tensor, Tensor], Tensor],
        chance: Chance,
        held_out: tuple[Tensor, Tensor],
    ) -> None:
        self.trainees = trainees
        self.P = P
        self._held_out = held_out
        self._world = world
        self._loss = loss
        self._chance = chance

    def update(self) -> float:
        """One step of every group; the mean loss over all of them. Collective."""
        total = torch.zeros((), dtype=torch.float64)
        for trainee in self.trainees:
            total += self._step(trainee)
        self._world.allreduce(total).wait()
        return total.item() / self.P

    @torch.no_grad()
    def meet(self) -> float:
        """All groups go on from the mean of their models; D = (1/P) Σ_i ‖w_i − w̄‖₂ before that (eq. 9).

        Collective: an allreduce of the sum of the models, then of the sum of the norms.
        """
        mean = torch.stack([_vector(trainee.model) for trainee in self.trainees]).sum(0)
        self._world.allreduce(mean).wait()
        mean.div_(self.P)
        norms = torch.zeros((), dtype=torch.float64)
        for trainee in self.trainees:
            norms += torch.linalg.vector_norm(_vector(trainee.model).sub_(mean), dtype=torch.float64)
            _take_over(trainee.model, mean)
        self._world.allreduce(norms).wait()
        return norms.item() / self.P

    @torch.no_grad()
    def loss(self) -> float:
        """Of the averaged model with averaged statistics, on the held-out samples, just after a meeting."""
        model = self.trainees[0].model
        buffers = _float_buffers(model)
        own = [buffer.clone() for buffer in buffers]
        for i, buffer in enumerate(buffers):
            buffer.copy_(torch.stack([_float_buffers(t.model)[i] for t in self.trainees]).sum(0))
            self._world.allreduce(buffer).wait()
            buffer.div_(self.P)
        model.eval()
        x, y = self._held_out
        loss = self._loss(model(x), y).item()
        model.train()
        for buffer, before in zip(buffers, own, strict=True):
            buffer.copy_(before)
        return loss

    def _step(self, trainee: Trainee) -> float:
        trainee.optimizer.zero_grad()
        total = 0.0
        for member in trainee.members:
            self._chance.set(member.chance)
            x, y = next(member.batches)
            loss = self._loss(trainee.model(x), y) / len(trainee.members)
            loss.backward()
            total += loss.item()
            member.chance = self._chance.read()
        if not math.isfinite(total):
            raise UserError(f"the loss with {self.P} groups is {total}: try a lower learning rate")
        trainee.optimizer.step()
        trainee.after_update()
        return total


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _float_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def _take_over(model: nn.Module, vector: Tensor) -> None:
    parameters = list(model.parameters())
    for p, values in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        p.copy_(values.view(p.shape))
