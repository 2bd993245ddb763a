"""Small versions of optimizers that do more than `step()`, so that tests need no library with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn, optim

Params = Iterable[nn.Parameter]


class Sam(optim.Optimizer):
    """Sharpness-aware minimization, as its authors wrote it.

    It makes a step up, computes a second gradient, and steps back. The step back replaces the parameters'
    memory.
    """

    def __init__(self, params: Params, rho: float = 0.05, lr: float = 0.1) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})
        self.base_optimizer = optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class ScheduleFree(optim.Optimizer):
    """Schedule-free SGD. `eval()` converts the weights to those that are evaluated."""

    def __init__(self, params: Params, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def eval(self) -> None:
        self._move(to=False, weight=lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        self._move(to=True, weight=lambda beta: 1 - beta)

    def _move(self, *, to: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["train_mode"] = to

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                c, beta = 1 / group["k"], group["beta"]
                p.lerp_(z, c)
                p.add_(p.grad, alpha=group["lr"] * (beta * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Gpa(optim.Optimizer):
    """Generalized primal averaging of SGD.

    It stores its mode and its step count in the state of the first parameter of each parameter group, as the
    package `gpa` does.
    """

    def __init__(self, params: Params, lr: float = 0.1, mu_y: float = 0.7, mu_x: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "mu_y": mu_y, "mu_x": mu_x})

    def _shared(self, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[group["params"][0]]
        state.setdefault("train_mode", torch.tensor(False))
        state.setdefault("step", torch.tensor(0, dtype=torch.int64))
        return state

    def eval(self) -> None:
        self._move(to=False, weight=lambda mu: 1 - 1 / mu)

    def train(self) -> None:
        self._move(to=True, weight=lambda mu: 1 - mu)

    @torch.no_grad()
    def _move(self, *, to: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            shared = self._shared(group)
            if bool(shared["train_mode"]) != to:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["mu_y"]))
                shared["train_mode"].fill_(to)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shared = self._shared(group)
            if not shared["train_mode"]:
                raise RuntimeError("not in train mode")
            shared["step"] += 1
            lr, mu_y, mu_x = group["lr"], group["mu_y"], group["mu_x"]
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 - mu_x).add_(p.grad, alpha=lr * (mu_y * mu_x - 1))
                z.sub_(p.grad, alpha=lr)


class Polyak(optim.Optimizer):
    """SGD with a Polyak step size, which is proportional to the loss over ‖g‖²."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        rate = float(loss) / sum(float(p.grad.square().sum()) for p in params)
        for p in params:
            p.sub_(p.grad, alpha=0.1 * rate)
        return loss


class LooksAhead(optim.Optimizer):
    """An optimizer that uses the gradient at changed weights, and finally replaces the parameters' memory."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            self.state[p]["before"] = p.clone()
            p.mul_(1.5)
        with torch.enable_grad():
            closure()
        for p in params:
            p.data = self.state[p]["before"] - 0.1 * p.grad


class Nudging(optim.Optimizer):
    """An elementwise optimizer with another method, `nudge`, that uses gradients."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def nudge(self, by: float) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(p.grad, alpha=by)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.nudge(-0.1)


class Counting(optim.Optimizer):
    """SGD with a decaying rate. It counts its steps under a state key that is not a parameter, as MADGRAD."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.state: Any  # torch's type allows only tensors as keys
        self.state["k"] = torch.zeros((), dtype=torch.int64, device="cpu")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["k"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / int(self.state["k"]))


class Lookahead:
    """A wrapper of another optimizer with slow weights, to which the fast ones are set every `k` steps.

    It is like the one of timm.
    """

    def __init__(self, optimizer: optim.Optimizer, alpha: float = 0.5, k: int = 2) -> None:
        self.optimizer, self.alpha, self.k = optimizer, alpha, k
        self.param_groups = optimizer.param_groups
        for group in self.param_groups:
            group["lookahead_step"] = 0

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % self.k == 0:
                for p in group["params"]:
                    if p.grad is not None:
                        slow = self.optimizer.state[p].setdefault("slow", p.clone())
                        slow.add_(p.data - slow, alpha=self.alpha)
                        p.data.copy_(slow)


class Adaptive(optim.Optimizer):
    """An optimizer with numbers in its parameter groups, as Prodigy.

    `d` and `k` are there from the beginning, `step` from the first step on.
    """

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 0.5, "k": 0, "flag": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] *= 0.9
            group["k"] += 1
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * group["d"] / group["step"])
