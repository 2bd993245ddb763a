"""Trainings with Lightning and the same ones with a plain loop of hpcsgd, on 2 groups of 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from scene import BATCH, DATA, Fitted, Net, Plain, fit, plain, sent_in_steps
from torch import nn
from torch.utils.data import DataLoader

import hpcsgd

MAX_NORM, MAX_VALUE = 0.3, 0.02


def compared(fitted: Fitted, loop: Plain) -> dict[str, Any]:
    """Return the results of both on this rank, and the bytes that both sent for gradients and models."""
    found = loop.train(fitted.strategy.topology)
    return {
        "lightning": fitted.found,
        "plain": found,
        "sent": [sent_in_steps(fitted.sent), sent_in_steps(loop.sent)],
    }


def case_bits(folder: Path) -> Any:
    fitted = fit(validate=True)
    return compared(fitted, plain(fitted.strategy.topology))


def case_clip_norm(folder: Path) -> Any:
    fitted = fit(gradient_clip_val=MAX_NORM)
    return compared(fitted, plain(fitted.strategy.topology, clip=lambda each: each.clip_grad_norm_(MAX_NORM)))


def case_clip_value(folder: Path) -> Any:
    def clip(optimizer: hpcsgd.DistributedOptimizer) -> None:
        optimizer.synchronize()
        nn.utils.clip_grad_value_([param for _, param in optimizer.trained], MAX_VALUE)

    fitted = fit(gradient_clip_val=MAX_VALUE, gradient_clip_algorithm="value")
    return compared(fitted, plain(fitted.strategy.topology, clip=clip))


def case_accumulated(folder: Path) -> Any:
    fitted = fit(accumulate_grad_batches=3)
    return compared(fitted, plain(fitted.strategy.topology, accumulate=lambda epoch: 3))


def case_accumulated_by_schedule(folder: Path) -> Any:
    fitted = fit(callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])
    return compared(fitted, plain(fitted.strategy.topology, accumulate=lambda epoch: 4 if epoch else 1))


class Manual(Net):
    """A module with manual optimization, which makes a step after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1 or self.trainer.is_last_batch:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def on_train_epoch_end(self) -> None:
        schedule: Any = self.lr_schedulers()
        schedule.step()


def case_manual(folder: Path) -> Any:
    fitted = fit(Manual)
    return compared(fitted, plain(fitted.strategy.topology, accumulate=lambda epoch: 2))


def case_bf16_mixed(folder: Path) -> Any:
    fitted = fit(precision="bf16-mixed")
    return compared(fitted, plain(fitted.strategy.topology, autocast=lambda: autocast(torch.bfloat16)))


def case_bf16_true(folder: Path) -> Any:
    fitted = fit(precision="bf16-true")
    return compared(fitted, plain(fitted.strategy.topology, dtype=torch.bfloat16))


def case_fp16_mixed(folder: Path) -> Any:
    """The gradients overflow at the first scale."""
    given = torch.amp.GradScaler("cpu", init_scale=2.0**21)
    fitted = fit(plugins=[MixedPrecision("16-mixed", "cpu", given)], gradient_clip_val=MAX_NORM)
    scaler = hpcsgd.GradScaler("cpu", init_scale=2.0**21)
    clip = lambda optimizer: optimizer.clip_grad_norm_(MAX_NORM)  # noqa: E731
    loop = plain(fitted.strategy.topology, scaler=scaler, clip=clip, autocast=lambda: autocast(torch.float16))
    return compared(fitted, loop) | {"global_step": fitted.trainer.global_step}


def case_own_sampler(folder: Path) -> Any:
    topology = hpcsgd.init(groups=2)
    sampler = hpcsgd.Sampler(DATA, topology, seed=5)
    fitted = fit(data=DataLoader(DATA, BATCH, sampler=sampler), use_distributed_sampler=False)
    return compared(fitted, plain(topology, sampler=hpcsgd.Sampler(DATA, topology, seed=5)))


def autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, cache_enabled=False)
