"""The small module that the programs of this folder train, with Lightning and with a plain loop of hpcsgd."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcsgd
import lightning
from hpcsgd.comm.stats import Total
from hpcsgd.lightning import HpcsgdStrategy
from hpcsgd.methods import hierarchical

warnings.simplefilter("ignore")  # Lightning's advice about loaders
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SEED, BATCH, LR, EVERY = 1, 8, 0.1, 4
NODES = int(os.environ.get("HPCSGD_TEST_NODES", "1"))
"""The number of nodes on which the ranks run, from the test that starts them."""
torch.manual_seed(0)
DATA = TensorDataset(torch.randn(336, 12), torch.randint(0, 4, (336,)))
"""On each of 4 ranks an epoch has 11 batches, of which the last one is smaller."""


class Net(lightning.LightningModule):
    """A classifier without any code for hpcsgd."""

    def __init__(self, drop: float = 0.0, *, norm: bool = True) -> None:
        super().__init__()
        layers = [nn.Linear(12, 16), nn.Dropout(drop), nn.ReLU(), nn.Linear(16, 4)]
        self.net = nn.Sequential(*layers[:1], *([nn.BatchNorm1d(16)] if norm else []), *layers[1:])

    def loss(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x.to(next(self.parameters()).dtype)), y)

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = optim.SGD(self.parameters(), lr=LR, momentum=0.9)
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@dataclass
class Fitted:
    """A finished training with Lightning."""

    trainer: lightning.Trainer
    module: lightning.LightningModule
    strategy: HpcsgdStrategy
    sent: Mapping[str, Total]
    """The bytes that this rank has sent in each phase."""

    @property
    def found(self) -> list[Any]:
        """Return the results that must equal the plain loop's: the averaged model's digests, and the
        steps."""
        return [*digests(self.module), *(each.t for each in self.strategy.optimizers)]  # pyright: ignore[reportAttributeAccessIssue]

    def on_all_ranks(self, value: Any) -> list[Any]:
        return self.strategy.topology.world.gather_objects(value)


def fit(
    make: Callable[[], lightning.LightningModule] = Net,
    method: Any = lambda: hierarchical(EVERY),
    *,
    epochs: int = 2,
    groups: int | None = 2,
    callbacks: Sequence[Callback] = (),
    data: Iterable[Any] | None = None,
    validate: bool = False,
    ckpt_path: Any = None,
    options: Mapping[str, Any] | None = None,
    **trainer_options: Any,
) -> Fitted:
    """Train with Lightning, on 4 ranks."""
    lightning.seed_everything(SEED, verbose=False)
    module = make()
    strategy = HpcsgdStrategy(method, groups, timeout_s=90, **(options or {}))
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    trainer = lightning.Trainer(**{
        "strategy": strategy, "accelerator": "cpu", "devices": 4 // NODES, "num_nodes": NODES,
        "max_epochs": epochs, "logger": False,
        "callbacks": list(callbacks), "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": saves, **trainer_options,
    })  # fmt: skip
    before = strategy.topology.world.stats.totals()
    trainer.fit(
        module,
        DataLoader(DATA, BATCH, shuffle=True) if data is None else data,
        held_out() if validate else None,
        ckpt_path=ckpt_path,
    )
    return Fitted(trainer, module, strategy, strategy.topology.world.stats.since(before))


def held_out() -> DataLoader[Any]:
    return DataLoader(DATA, 32)


@dataclass
class Plain:
    """The same training with a loop around `DistributedOptimizer`."""

    module: nn.Module = field(default_factory=Net)
    accumulate: Callable[[int], int] = lambda epoch: 1
    """The number of backward passes per step, by epoch."""
    clip: Callable[[Any], object] = lambda optimizer: None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: Any = None
    sampler: Any = None
    sent: Mapping[str, Total] = field(default_factory=dict)

    def train(self, topology: hpcsgd.Topology, epochs: int = 2) -> list[Any]:
        """Train, and return the expected value of `Fitted.found`."""
        inner: Any = optim.SGD(self.module.parameters(), lr=LR, momentum=0.9)
        schedule = optim.lr_scheduler.StepLR(inner, 1, 0.5)
        optimizer = hpcsgd.DistributedOptimizer(inner, self.module, topology, hierarchical(EVERY))
        if self.scaler is not None:
            optimizer.scaled = True
        sampler = self.sampler or DistributedSampler(DATA, topology.world_size, topology.rank, seed=SEED)
        before = topology.world.stats.totals()
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            optimizer.set_gradient_accumulation_steps(passes := self.accumulate(epoch))
            loader = DataLoader(DATA, BATCH, sampler=sampler)
            for number, batch in enumerate(loader, start=1):
                self._backward(batch, passes)
                if number % passes == 0 or number == len(loader):
                    self._step(optimizer)
            schedule.step()
        self.sent = topology.world.stats.since(before)
        with optimizer.averaged_model():
            return [*digests(self.module), optimizer.t]

    def _backward(self, batch: Any, passes: int) -> None:
        with self.autocast():
            loss = self.module.loss(batch) / passes  # pyright: ignore[reportCallIssue]
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _step(self, optimizer: hpcsgd.DistributedOptimizer) -> None:
        if self.scaler is None:
            self.clip(optimizer)
            optimizer.step()
        else:
            self.scaler.unscale_(optimizer)
            self.clip(optimizer)
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()


def plain(topology: hpcsgd.Topology, *, dtype: torch.dtype | None = None, **changes: Any) -> Plain:
    """Return a plain loop that starts from the same model as `fit`."""
    lightning.seed_everything(SEED, verbose=False)
    return Plain(Net().to(dtype=dtype), **changes)


def digest(module: nn.Module) -> str:
    """Return a checksum of the parameters and buffers."""
    return " ".join(digests(module))


def digests(module: nn.Module) -> list[str]:
    """Return the checksums of the parameters and of the buffers."""
    return [_digest(module.parameters()), _digest(module.buffers())]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    values = [x.detach().float().numpy().tobytes() for x in tensors]
    return hashlib.sha256(b"".join(values)).hexdigest()[:12]


def sent_in_steps(totals: Mapping[str, Total]) -> dict[str, float]:
    """Return the bytes that this rank has sent for each part of a step."""
    phases = ("grad_reduce", "clipping", "overflow", "param_gather", "model_average")
    return {phase: totals[phase].bytes for phase in phases if phase in totals}
