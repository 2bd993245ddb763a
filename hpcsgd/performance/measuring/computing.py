"""Measure the speed of computing on all ranks at once, with idle and with busy communication threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import optim

from hpcsgd.comm import Communicator
from hpcsgd.comm.backend_choice import place_on_node
from hpcsgd.comm.streams import device_for
from hpcsgd.cost.compute import Busy, Compute
from hpcsgd.parts.sparsifiers import (
    Accumulated,
    CLTk,
    Deft,
    ExDyna,
    HardThreshold,
    MiCRO,
    SIDCo,
    Sparsifier,
    TopK,
)
from hpcsgd.performance.measuring.comm_threads import busy
from hpcsgd.performance.measuring.timing import Barriers, clock
from hpcsgd.performance.measuring.workload import Workload

ELEMENTS = 4_000_000
"""The number of elements in timed means and updates without a model, and the least for selections."""
LAYERS = 32
DENSITY = 0.01
SELECTORS: Mapping[str, Callable[[], Sparsifier]] = {
    "clt_k": lambda: CLTk(DENSITY),
    "deft": lambda: Deft(DENSITY),
    "exdyna": lambda: ExDyna(DENSITY),
    "hard_threshold": lambda: HardThreshold(2.576),  # 1 % of normally distributed numbers are beyond it
    "micro": lambda: MiCRO(DENSITY),
    "sidco": lambda: SIDCo(DENSITY),
    "topk": lambda: TopK(DENSITY),
}
LEAST_ROUNDS = 3
ROUNDS = 30
Times = dict[str, list[float]]
"""Median seconds of each part of a step. `forward` and `backward` have a value for each batch size."""


def measure(world: Communicator, workload: Workload | None, seconds: float) -> Compute:
    """Return the speed of the parts of a step, measured in about `seconds`; the same on all ranks.

    Collective. Without a `workload` only parts that need no model are measured.
    """
    alone, place = world.split(world.rank, 0), place_on_node(world)
    device = device_for("auto", place) if workload is None else workload.device
    parts = {"mean": _mean(device), **dict(_selections(alone, workload, device))}
    if workload is None:
        parts["update"] = _update(device)
    timed = {name: partial(_seconds, part, device) for name, part in parts.items()}
    idle = _times(world, workload, timed, seconds / 2)
    with busy(world):
        loaded = _times(world, workload, timed, seconds / 2)
    M = workload.numel if workload else None
    searched = _searched(workload)
    return Compute(
        numel=M,
        batch_sizes=tuple(workload.batch_sizes) if workload else (),
        forward_seconds_by_batch=tuple(map(_rounded, idle.get("forward", []))),
        backward_seconds_by_batch=tuple(map(_rounded, idle.get("backward", []))),
        update_seconds_per_element=_rounded(idle["update"][0] / (M or ELEMENTS)),
        mean_seconds_per_element=_rounded(idle["mean"][0] / ELEMENTS),
        selection_seconds_per_element={name: _rounded(idle[name][0] / searched) for name in SELECTORS},
        busy=_slower(idle, loaded),
    )


def _times(
    world: Communicator,
    workload: Workload | None,
    parts: Mapping[str, Callable[[], Sequence[float]]],
    seconds: float,
) -> Times:
    together, found = Barriers(world), Times()
    budget = seconds / (len(parts) + (2 * len(workload.batch_sizes) if workload else 0))
    if workload is not None:
        updates: list[float] = []
        for batch in workload.batch_sizes:
            forward, backward, update = _steps(together, partial(workload.step, batch), 2 * budget)
            found.setdefault("forward", []).append(forward)
            found.setdefault("backward", []).append(backward)
            updates.append(update)
        found["update"] = [median(updates)]
    for name, part in parts.items():
        found[name] = _steps(together, part, budget)
    return found


def _steps(together: Barriers, step: Callable[[], Sequence[float]], budget: float) -> list[float]:
    """Return the seconds of each part that `step` times, on the slowest rank, as a median over rounds."""
    step()
    rounds: list[list[float]] = []
    spent = 0.0
    while len(rounds) < LEAST_ROUNDS or (spent < budget and len(rounds) < ROUNDS):
        begun = perf_counter()
        together.barrier()
        parts = step()
        *slowest, took = together.slowest(*parts, perf_counter() - begun)
        rounds.append(slowest)
        spent += took
    return [median(part) for part in zip(*rounds, strict=True)]


def _seconds(call: Callable[[], Any], device: torch.device) -> list[float]:
    start = clock(device)
    call()
    return [clock(device) - start]


def _update(device: torch.device) -> Callable[[], Any]:
    """Return a function that updates `ELEMENTS` parameters by SGD with momentum."""
    w = torch.ones(ELEMENTS, requires_grad=True, device=device)
    w.grad = torch.full_like(w, 1e-6)
    return optim.SGD([w], lr=0.1, momentum=0.9).step


def _mean(device: torch.device) -> Callable[[], Any]:
    """Return a function that computes the mean of four shards, as ranks do after an all-to-all."""
    received = torch.ones(4, ELEMENTS // 4, device=device)
    own = torch.empty(ELEMENTS // 4, device=device)
    return lambda: torch.mean(received, 0, out=own)


def _selections(
    alone: Communicator, workload: Workload | None, device: torch.device
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each sparsifier's name, and a function with which one rank selects from all elements."""
    x = torch.randn(_searched(workload), device=device)
    for name, make in SELECTORS.items():
        yield name, _selection(make(), x, alone)


def _searched(workload: Workload | None) -> int:
    """Return the number of elements to select from, which is large enough to hide a call's overhead."""
    return max(workload.numel if workload else 0, ELEMENTS)


def _selection(sparsifier: Sparsifier, acc: torch.Tensor, alone: Communicator) -> Callable[[], Any]:
    bounds = sparsifier.cut(torch.linspace(0, len(acc), LAYERS + 1, device="cpu").long(), 1)
    layers = [acc[start:stop] for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    norms = torch.stack([layer.double().square().sum() for layer in layers])
    x = Accumulated(acc, bounds, norms)
    return lambda: sparsifier.select(x, sparsifier.share(x, 0, alone))


def _slower(idle: Times, loaded: Times) -> Busy:
    def times(*names: str) -> float | None:
        pairs = [
            pair for name in names if name in idle for pair in zip(idle[name], loaded[name], strict=True)
        ]
        return _rounded(median(after / before for before, after in pairs)) if pairs else None

    return Busy(
        forward=times("forward"), backward=times("backward"), update=times("update"),
        selection=times(*SELECTORS),
    )  # fmt: skip


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")
