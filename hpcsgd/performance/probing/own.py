"""`hpcsgd.probe`: the probe of a user's own model, optimizer and data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator, joining
from hpcsgd.core.generators import seed_generators
from hpcsgd.engine.lr import WarmUp, lr_scale
from hpcsgd.errors import UserError
from hpcsgd.performance.probing.idle import IN_MEMORY, Offload
from hpcsgd.performance.probing.probe import GROUPS, Plan, Probe
from hpcsgd.performance.probing.probe import probe as probe_groups
from hpcsgd.performance.probing.replicas import Chance, Trainee, VirtualGroups
from hpcsgd.performance.probing.virtual_ranks import virtual_rank
from hpcsgd.train.growth import THRESHOLD

HELD_OUT = 512
"""Samples, at most, to see the loss on after every meeting."""


@checked
def probe(
    model: Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter], float], optim.Optimizer],
    data: Dataset[Any],
    held_out: Dataset[Any],
    *,
    batch_size: int,
    lr: float,
    every: int,
    rule: str = "linear",
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    groups: Sequence[int] = GROUPS,
    seeds: Sequence[int] = (1,),
    threshold: float = THRESHOLD,
    idle: Offload = IN_MEMORY,
    world: Communicator | None = None,
) -> Probe:
    """How many groups can this training stand? `verdict.P` of the result; collective over `world`.

    Trains virtual groups for some meetings with P = 2, 4, 8, …, until the distance D between their models no
    longer grows with P. See `hpcsgd.performance.probing.probe` for the procedure and the
    differences from the paper.

    Not to be confused with `hpcsgd probe --delta`, which finds SelSync's threshold.

    Args:
        model: makes it, on the device it is to train on.
        optimizer: makes one of parameters and a rate.
        data: indexable, of pairs (x, y) of tensors or numbers, with a length.
        held_out: the same; the loss of the averaged model is seen on at most 512 of them.
        batch_size: B, samples of one group a step, as in the real run.
        lr: μ0, of one group; P groups train at lr_scale(rule, P) times that.
        every: I, steps between meetings, as in the real run.
        rule: of `lr_scale`, as in the real run. Default 'linear'. With "none" D says little of the model.
        loss: of the model's output and y. Default cross_entropy.
        groups: numbers of groups to try, growing, at least two from 2 on. Default (2, 4, 8, 16, 32).
        seeds: one training each; more of them make an unclear answer clear. Default (1,).
        threshold: of the growth ratio ρ, below which D no longer keeps up with P. Default 0.87, between what
            the paper's figures accept and reject.
        idle: where models are while others train: `IN_MEMORY`, or `PinnedMemory()` or `OnDisk(folder)` of
            `hpcsgd.performance.probing.idle`, where they do not fit. Default IN_MEMORY.
        world: the ranks that share the work. Default None: those that the launcher started.

    Raises:
        UserError: where this cannot be answered: other groups, no room for the models, a training that
            diverges with the smallest number of groups, or models that nothing moves.

    Example:
        >>> def make():
        ...     return torch.nn.Linear(4, 3)
        >>> found = hpcsgd.probe(
        ...     make, torch.optim.SGD, data, data, batch_size=8, lr=0.05, every=2, groups=(2, 4)
        ... )
        >>> found.verdict.P in (2, 4)
        True

    Source:
        S. Lee et al., IEEE Big Data 2020, section III-C, eq. 9.
    """
    for name, count in (("every", every), ("batch_size", batch_size)):
        if count < 1:
            raise UserError(f"{name} = {count}: expected 1 or more")
    for name, number in (("lr", lr), ("threshold", threshold)):
        if not 0 < number < math.inf:
            raise UserError(f"{name} = {number}: expected a number > 0")
    if not seeds:
        raise UserError("seeds: expected at least one")
    lr_scale(rule, 1)
    if world is None:
        world = joining.world()
    plan = Plan(
        groups=groups, every=every, batch_size=batch_size, lr=lr, rule=rule, seeds=seeds, threshold=threshold
    )
    size = len(held_out)  # pyright: ignore[reportArgumentType] - torch's Dataset promises no length
    if size == 0:
        raise UserError("held_out: expected samples to see the loss on, given none")
    shown = range(0, size, -(-size // HELD_OUT))

    def start(P: int, seed: int, hosts: Communicator) -> VirtualGroups:
        seed_generators(seed)
        first = model()
        device = next(first.parameters()).device
        trainees = [_trainee(copy.deepcopy(first), g, P, seed) for g in range(hosts.rank, P, hosts.size)]
        return VirtualGroups(
            trainees, P, hosts, loss, Chance.on(device), _load(held_out, shown, device), idle
        )

    def _trainee(local: nn.Module, g: int, P: int, seed: int) -> Trainee:
        made = optimizer(local.parameters(), lr * lr_scale(rule, P))
        WarmUp(made, plan.ramp * every, 1 / lr_scale(rule, P))
        device = next(local.parameters()).device
        only = virtual_rank(data, lambda rows: _load(data, rows, device), batch_size, g, P, seed, device)  # pyright: ignore[reportArgumentType]
        return Trainee(local, made, [only])

    return probe_groups(start, plan, world, idle=idle)


def _load(data: Dataset[Any], rows: Iterable[int], device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = default_collate([data[row] for row in rows])
    return x.to(device), y.to(device)
