"""Small trainings that have everything that a checkpoint has to contain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

import hpcsgd
from hpcsgd.core.topology import Topology, form
from hpcsgd.methods import Method
from methods.table import EXCEPTIONS, REFERENCES


class Net(nn.Module):
    """A net with batch norm, channels_last, frozen and tied weights, a scalar parameter and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(4, 5).requires_grad_(False)
        self.encode = nn.Linear(5, 5)
        self.decode = nn.Linear(5, 5)
        self.decode.weight = self.encode.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        x = self.decode(self.encode(self.frozen(x)).tanh()) * self.scale
        return self.head(x.double())


class Rows(optim.Optimizer):
    """An optimizer that needs whole tensors, because a step depends on norms. Its state has many shapes."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group["lr"])

    def _update(self, p: nn.Parameter, g: Tensor, lr: float) -> None:
        state = self.state[p]
        if not state:
            state.update(
                sums=torch.zeros_like(p),
                rows=p.new_zeros(len(p) + 1 if p.dim() else 2, dtype=torch.float),
                seen=0,
                norms=[],
            )
        state["sums"].mul_(0.9).add_(g)
        state["rows"] += g.norm().float()
        state["seen"] += 1
        state["norms"] = [p.norm().item(), *state["norms"]][:2]
        rows = state["rows"][0].clamp(min=1e-9)  # 0 as long as nothing of a sparse gradient was sent
        p -= lr * state["sums"] * p.norm() / rows / state["seen"]


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in net.parameters() if p.requires_grad]
    return [{"params": trained[1::2], "lr": 0.02}, {"params": trained[0::2]}]


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "momentum": lambda net: optim.SGD(two_groups(net), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda net: optim.AdamW(two_groups(net), lr=0.01, amsgrad=True, betas=(0.8, 0.9)),
    "plain": lambda net: optim.SGD(net.parameters(), lr=0.1),
    "Adagrad": lambda net: optim.Adagrad(net.parameters(), lr=0.1),
    "NAdam": lambda net: optim.NAdam(net.parameters(), lr=0.01),
    "ASGD": lambda net: optim.ASGD(net.parameters(), lr=0.01),
    "Rprop": lambda net: optim.Rprop(net.parameters(), lr=0.01),
    "QHAdam": lambda net: hpcsgd.QHAdam(two_groups(net), lr=0.01, betas=(0.8, 0.9), weight_decay=1e-3),
    "muon": lambda net: hpcsgd.muon(net, lr=0.02, hidden=["encode.weight", "head.weight"]),
    "muon by rows": lambda net: hpcsgd.muon(net, lr=0.02, period=3),
    "whole tensors": lambda net: Rows([p for p in net.parameters() if p.requires_grad], lr=0.1),
}

IN_ONE_JOB = {label: case for label, case in REFERENCES.items() if case.form is form}
"""All references, except those of replica groups: their jobs have one group each and keep no state."""
METHODS: dict[str, Callable[[], Method]] = {
    label: case.new for label, case in IN_ONE_JOB.items() if case.same_bits and not case.plain_sgd
}
"""Methods that continue to the same bits from a checkpoint, with any optimizer."""
PLAIN = {label: case.new for label, case in IN_ONE_JOB.items() if case.plain_sgd}
WAITING_FOR_NOBODY = {label: exempt.new for label, exempt in EXCEPTIONS.items()}
"""Methods whose results depend on which rank is faster; see methods/test_waiting_for_nobody.py."""


class Training:
    """A net and an optimizer in a job. Every rank has different samples in every step."""

    def __init__(
        self,
        topology: Topology,
        optimizer: str = "momentum",
        method: str | Callable[[], Method] = "hierarchical",
        *,
        make: Callable[[], nn.Module] = Net,
        seed: int = 0,
        device: torch.device | None = None,
        share: Callable[[nn.Module, Topology], object] | None = None,
        **options: Any,
    ) -> None:
        """`share` shards the net among the ranks of a group, as FSDP does; they start with the same net."""
        self.device = device
        with contextlib.nullcontext() if device is None else device:
            self.net = make()
        start = topology.rank if share is None else topology.group_index
        generator = torch.Generator().manual_seed(100 * seed + start)  # threads share torch's own
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 2)
        if share is not None:
            share(self.net, topology)
        options = {"bucket_cap_mb": 1e-4, **options}
        make_method = (METHODS | PLAIN | WAITING_FOR_NOBODY)[method] if isinstance(method, str) else method
        inner = OPTIMIZERS[optimizer](self.net)
        self.optimizer = hpcsgd.DistributedOptimizer(inner, self.net, topology, make_method(), **options)
        self.t = 0

    def steps(self, n: int) -> None:
        for _ in range(n):
            generator = torch.Generator().manual_seed(100 * self.t + self.optimizer.topology.rank)
            x, y = (
                torch.randn(4, 3, 6, 6, generator=generator),
                torch.randint(0, 3, (4,), generator=generator),
            )
            self.optimizer.zero_grad()
            loss = cross_entropy(self.net(x.to(self.device)), y.to(self.device))
            loss.backward()
            self.optimizer.step(loss=loss)
            self.t += 1

    def everything(self) -> dict[str, Tensor]:
        """Return the model and the optimizer's state of whole parameters. Collective."""
        found = {f"model.{name}": value.clone() for name, value in self.net.state_dict().items()}
        state = self.optimizer.state_dict()["state"]
        for i, values in state.items():
            for name, value in values.items():
                if value is not None:
                    found[f"{i}.{name}"] = torch.as_tensor(value).clone()
        return found
