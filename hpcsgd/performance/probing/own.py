"""`hpcsgd.probe`: probe a user's own model, optimizer and data."""

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
"""The largest number of samples on which the loss is evaluated after every synchronization."""


@checked
def probe(
    model: Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter], float], optim.Optimizer],
    data: Dataset[Any],
    held_out: Dataset[Any],
    *,
    batch_size: int,
    lr: float,
    sync_every: int,
    rule: str = "linear",
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    groups: Sequence[int] = GROUPS,
    seeds: Sequence[int] = (1,),
    threshold: float = THRESHOLD,
    idle: Offload = IN_MEMORY,
    world: Communicator | None = None,
) -> Probe:
    """Find the number of groups P that a training can use.

    The probe trains P = 2, 4, 8, … virtual groups for some synchronizations each, until the distance D of
    their models no longer grows with P. `hpcsgd.performance.probing.probe` describes the procedure and its
    differences from the paper. Collective over `world`.

    Args:
        model: Function that builds the model on the device on which it trains.
        optimizer: Function of parameters and a learning rate that builds the optimizer.
        data: Indexable data with a length; samples are pairs (x, y) of tensors or numbers.
        held_out: Data like `data`. The averaged model's loss is evaluated on at most 512 of its samples.
        batch_size: Samples per step of one group (the paper's B), as in the real run.
        lr: Learning rate of a single group (μ0). P groups train at `lr_scale(rule, P)` times this rate.
        sync_every: Steps between two synchronizations (the paper's I), as in the real run.
        rule: Rule of `lr_scale`, as in the real run. Default 'linear'. With "none" D says little about
            how many groups the training stands.
        loss: Function of the model's output and y. Default cross_entropy.
        groups: Numbers of groups to try: at least two, ascending, from 2 on. Default (2, 4, 8, 16, 32).
        seeds: Seeds, one training each. More of them can settle an unclear answer. Default (1,).
        threshold: Growth ratio ρ below which D no longer grows as fast as P. Default 0.87, between the ratios
            that the paper's figures accept and reject.
        idle: Where models that are not training are kept: `IN_MEMORY`, or, if they do not fit,
            `PinnedMemory()` or `OnDisk(folder)` of `hpcsgd.performance.probing.idle`. Default IN_MEMORY.
        world: Ranks that share the work. Default None: those that the launcher started.

    Returns:
        A `Probe`: `verdict.P` is the answer, `rows` has the distances and losses of every P.

    Raises:
        UserError: If the probe cannot answer: an invalid argument, no room for the models, a training that
            diverges with the smallest number of groups, or models that do not change.

    Shape:
        x and y have any shape that torch can collate: `loss` gets the model's output for a batch of x, and
        the batch of y.

    Example:
        >>> def make():
        ...     return torch.nn.Linear(4, 3)
        >>> found = hpcsgd.probe(
        ...     make, torch.optim.SGD, data, data, batch_size=8, lr=0.05, sync_every=2, groups=(2, 4)
        ... )
        >>> found.verdict.P in (2, 4)
        True

    References:
        S. Lee et al., IEEE Big Data 2020, section III-C, eq. 9.
    """
    for name, count in (("sync_every", sync_every), ("batch_size", batch_size)):
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
        groups=groups, sync_every=sync_every, batch_size=batch_size, lr=lr, rule=rule, seeds=seeds,
        threshold=threshold,
    )  # fmt: skip
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
        WarmUp(made, plan.ramp * sync_every, 1 / lr_scale(rule, P))
        device = next(local.parameters()).device
        only = virtual_rank(data, lambda rows: _load(data, rows, device), batch_size, g, P, seed, device)  # pyright: ignore[reportArgumentType]
        return Trainee(local, made, [only])

    return probe_groups(start, plan, world, idle=idle)


def _load(data: Dataset[Any], rows: Iterable[int], device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = default_collate([data[row] for row in rows])
    return x.to(device), y.to(device)
