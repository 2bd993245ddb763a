"""References for methods: the same trainings, written in plain torch without ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator
from hpcsgd.core.graphs import Graph
from hpcsgd.core.topology import Topology, form
from hpcsgd.methods import Method

BATCH = 3
"""Samples of one rank and step."""

MakeOptimizer = Callable[[list[nn.Parameter]], optim.Optimizer]


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small model of odd sizes, whose shards need padding, and without running statistics."""
    generator = torch.Generator().manual_seed(seed)  # torch's own is shared by all threads
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype, device="cpu") / 2)
    return layers


def batch(t: int, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a rank's batch in step t, on the host."""
    generator = torch.Generator().manual_seed(1000 * t + rank)
    x = torch.randn(BATCH, 5, generator=generator, dtype=dtype, device="cpu")
    return x, torch.randint(0, 3, (BATCH,), generator=generator, device="cpu")


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x), y)


def vector(net: nn.Module) -> Tensor:
    """Return all parameters as one vector of real numbers."""
    params = (p.detach() for p in net.parameters())
    return torch.cat([(torch.view_as_real(p) if p.is_complex() else p).reshape(-1) for p in params]).clone()


Rates = Sequence[float]
"""The factor of the learning rate in each step."""


def distributed(
    world: Communicator,
    P: int,
    method: Method,
    make: MakeOptimizer,
    steps: int,
    *,
    rates: Rates = (),
    form: Callable[[Communicator, int], Topology] = form,
    device: torch.device | None = None,
    **options: object,
) -> list[Tensor]:
    """Train over `world` as P groups, and return this rank's parameters after each step.

    The model is on `device`; None stands for torch's default device.
    """
    topology = form(world, P)
    net = model(seed=world.rank).to(device)  # all ranks then take the parameters of rank 0
    optimizer = hpcsgd.DistributedOptimizer(make(list(net.parameters())), net, topology, method, **options)  # type: ignore[arg-type]
    set_rate = follow(optimizer, rates)
    history = []
    for t in range(steps):
        set_rate(t)
        history.append(one_step(net, optimizer, topology, t))
    return history


def follow(optimizer: optim.Optimizer, rates: Rates) -> Callable[[int], None]:
    """Return a function that sets the learning rate of step t; without `rates` it changes nothing."""
    own = [group["lr"] for group in optimizer.param_groups]

    def set_rate(t: int) -> None:
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr * rates[t] if rates else group["lr"]

    return set_rate


def following(rates: Rates, make: MakeOptimizer) -> MakeOptimizer:
    """Return a factory of optimizers that set their own learning rates at the beginning of each step."""

    def made(params: list[nn.Parameter]) -> optim.Optimizer:
        optimizer, steps = make(params), itertools.count()
        set_rate = follow(optimizer, rates)
        optimizer.register_step_pre_hook(lambda *_: set_rate(next(steps)))
        return optimizer

    return made


def one_step(net: nn.Module, optimizer: optim.Optimizer, topology: Topology, t: int) -> Tensor:
    optimizer.zero_grad()
    device = next(net.parameters()).device
    x, y = (part.to(device) for part in batch(t, topology.rank))
    value = loss(net, x, y)
    value.backward()
    if isinstance(optimizer, hpcsgd.DistributedOptimizer):
        optimizer.step(loss=value)
    else:
        optimizer.step()
    return vector(net)


def local_sgd(
    P: int, K: int, every: int, make: MakeOptimizer, steps: int, together: int = 0
) -> list[list[Tensor]]:
    """Train groups whose parameters are averaged every `every` steps; see `alone`."""
    return alone(P, K, make, steps, synchronize_every(every), together)


Synchronize = Callable[[int, list[nn.Module], float], None]
"""Changes the groups' nets after step t = 1, 2, …; it also gets the mean of their losses in that step."""


def synchronize_every(every: int) -> Synchronize:
    def synchronize(t: int, nets: list[nn.Module], _: float) -> None:
        if t % every == 0:
            average(nets)

    return synchronize


def alone(
    P: int, K: int, make: MakeOptimizer, steps: int, synchronize: Synchronize, together: int = 0
) -> list[list[Tensor]]:
    """Train P single processes, each on its group's whole batch, and call `synchronize` after each step.

    In the first `together` steps each process trains on the batches of all groups.

    Returns:
        The parameters as [step][group].
    """
    nets = [model() for _ in range(P)]
    optimizers = [make(list(net.parameters())) for net in nets]
    history = []
    for t in range(steps):
        losses = [
            gathered_step(net, optimizer, t, seen_by(g, P, K, t < together))
            for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True))
        ]
        synchronize(t + 1, nets, sum(losses) / P)
        history.append([vector(net) for net in nets])
    return history


def seen_by(g: int, P: int, K: int, together: bool) -> range:
    """Return the ranks whose batches a group trains on."""
    return range(P * K) if together else range(g * K, (g + 1) * K)


def gossiped(
    P: int,
    K: int,
    graph: Graph,
    matrix: Callable[[Graph, int, int], Tensor],
    make: MakeOptimizer,
    steps: int,
    staleness: int = 0,
    together: int = 0,
) -> list[list[Tensor]]:
    """Train P single processes, and multiply their x and w, as rows, by the matrix after every update.

    What a row receives from others is added `staleness` steps later. In the first `together` steps each
    process trains on the batches of all groups instead.

    Returns:
        z = x / w as [step][group].
    """
    nets = [model() for _ in range(P)]
    optimizers = [make(list(net.parameters())) for net in nets]
    w = torch.ones(P, 1, dtype=torch.float64)
    under_way, history = [], []
    for t in range(steps):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            gathered_gradient(net, optimizer, t, seen_by(g, P, K, t < together))
            set_vector(net, vector(net) * w[g])
            optimizer.step()
        x = torch.stack([vector(net) for net in nets])
        if t < together:
            history.append(list(x))
            continue
        mixing = matrix(graph, t, P)
        kept = mixing.diag().view(P, 1)
        given = mixing - mixing.diag().diag()
        under_way.append((given @ x, given @ w))
        x, w = kept * x, kept * w
        if len(under_way) > staleness:
            late_x, late_w = under_way.pop(0)
            x, w = x + late_x, w + late_w
        history.append(list(x / w))
        for net, z in zip(nets, history[-1], strict=True):
            set_vector(net, z)
    return history


def pushed(P: int, K: int, make: MakeOptimizer, steps: int) -> list[Tensor]:
    """Train P single processes that begin every step with the mean of their updated parameters."""
    nets = [model() for _ in range(P)]
    optimizers = [make(list(net.parameters())) for net in nets]
    history = []
    for t in range(steps):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            gathered_step(net, optimizer, t, range(g * K, (g + 1) * K))
        history.append(torch.stack([vector(net) for net in nets]).mean(0))
        for net in nets:
            set_vector(net, history[-1])
    return history


def set_vector(net: nn.Module, values: Tensor) -> None:
    nn.utils.vector_to_parameters(values.clone(), net.parameters())


def big_batch(N: int, make: MakeOptimizer, steps: int) -> list[Tensor]:
    """Train one process on the concatenated batch of N ranks, and return its parameters after each step."""
    return [groups[0] for groups in local_sgd(1, N, steps + 1, make, steps)]


def gathered_step(net: nn.Module, optimizer: optim.Optimizer, t: int, ranks: range) -> float:
    """Make one update on the batches of `ranks` and return the loss before it."""
    value = gathered_gradient(net, optimizer, t, ranks)
    optimizer.step()
    return value


def gathered_gradient(net: nn.Module, optimizer: optim.Optimizer, t: int, ranks: range) -> float:
    """Compute the gradient of the joined batches of `ranks` and return the loss."""
    batches = [batch(t, rank) for rank in ranks]
    optimizer.zero_grad()
    value = loss(net, torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    value.backward()
    return value.item()


def fill_gradients(net: nn.Module) -> None:
    for p in net.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)


def average(nets: list[nn.Module]) -> None:
    with torch.no_grad():
        for together in zip(*(net.parameters() for net in nets), strict=True):
            mean = torch.stack(list(copy.deepcopy(together))).mean(0)
            for p in together:
                p.copy_(mean)


def same(ranks: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]], K: int) -> None:
    """Require that each rank's parameters [step] equal those of its group in `expected` [step][group]."""
    for rank, history in enumerate(ranks):
        for mine, groups in zip(history, expected, strict=True):
            torch.testing.assert_close(mine, groups[rank // K], rtol=0, atol=1e-12)
