"""Cases beyond one optimizer's numbers: several optimizers, callbacks, evaluations, loaders, errors."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from scene import BATCH, DATA, EVERY, SEED, Fitted, Net, digest, digests, fit, held_out, sent_in_steps
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import hpcsgd
import lightning
from hpcsgd.lightning import HpcsgdStrategy, LogMetrics
from hpcsgd.methods import hierarchical


class Gan(lightning.LightningModule):
    """A module with two optimizers, whose backward passes reach both parts unless one is toggled off."""

    def __init__(self, *, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization, self._toggles = False, toggles
        self.g, self.d = nn.Linear(4, 12), nn.Linear(12, 1)

    def loss_g(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(-self.d(self.g(x[:, :4]))).mean()

    def loss_d(self, x: torch.Tensor) -> torch.Tensor:
        made = nn.functional.softplus(self.d(self.g(x[:, :4]).detach())).mean()
        return made + nn.functional.softplus(-self.d(x)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, loss in zip(optimizers, (self.loss_g, self.loss_d), strict=True):
            if self._toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch[0]))
            optimizer.step()
            if self._toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [optim.Adam(each.parameters(), 1e-2) for each in (self.g, self.d)]


def case_two_optimizers(folder: Path) -> Any:
    lightning.seed_everything(SEED, verbose=False)
    module = Gan(toggles=False)
    topology = hpcsgd.init(groups=2)
    optimizers = [
        hpcsgd.DistributedOptimizer(each, module, topology, hierarchical(EVERY), overlap_grad_reduce=False)
        for each in module.configure_optimizers()
    ]
    sampler = DistributedSampler(DATA, topology.world_size, topology.rank, seed=SEED)
    for batch in DataLoader(DATA, BATCH, sampler=sampler):
        for optimizer, loss in zip(optimizers, (module.loss_g, module.loss_d), strict=True):
            optimizer.zero_grad()
            loss(batch[0]).backward()
            optimizer.step()
    with optimizers[0].averaged_model(), optimizers[1].averaged_model():
        plain = [*digests(module), *(each.t for each in optimizers)]
    found: dict[str, Any] = {"plain": plain}
    fitted = fit(lambda: Gan(toggles=False), epochs=1)
    found["not toggled"], found["global_step"] = fitted.found, fitted.trainer.global_step
    found["toggled"] = fit(lambda: Gan(toggles=True), epochs=1).found
    return found


class Unlike(Net):
    """A module whose monitored value gets worse on rank 2 only."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        epoch = self.trainer.current_epoch
        self.log("mine", float(epoch if self.trainer.global_rank == 2 else -epoch))


def case_early_stopping(folder: Path) -> Any:
    stops = EarlyStopping("mine", patience=1)
    fitted = fit(Unlike, callbacks=[stops], validate=True, epochs=6)
    return [fitted.trainer.current_epoch, *fitted.found]


class Averages(Callback):
    """A callback that records the averaged model at the start of each epoch.

    SWA adds the group's own model to its mean then.
    """

    def __init__(self) -> None:
        self.models: list[torch.Tensor] = []

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        optimizer: Any = trainer.optimizers[0]
        with optimizer.averaged_model():
            self.models.append(weights(pl_module))


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()])


def case_swa(folder: Path) -> Any:
    averages = Averages()
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=1)
    fitted = fit(lambda: Net(norm=False), callbacks=[averages, swa], epochs=3)
    mean = torch.stack(averages.models[:3]).mean(0)
    return [digest(fitted.module), (weights(fitted.module) - mean).abs().max().item()]


def case_evaluation(folder: Path) -> Any:
    """Each evaluation is of the averaged model: during fit, after it, and in a second fit."""
    sizes: dict[str, list[float]] = {}

    class Sees(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            where = "fit" if self.trainer.state.fn == "fit" else "after"
            sizes.setdefault(where, []).append(weights(self).double().sum().item())

        def test_step(self, batch: Any, batch_idx: int) -> None:
            sizes.setdefault("test", []).append(weights(self).double().sum().item())

        def on_train_epoch_start(self) -> None:
            sizes.setdefault("own", []).append(weights(self).double().sum().item())

    fitted = fit(Sees, validate=True, method=lambda: hierarchical(100))
    mine = digest(fitted.module)
    fitted.trainer.validate(fitted.module, held_out(), verbose=False)
    fitted.trainer.test(fitted.module, held_out(), verbose=False)
    predictions: Any = fitted.trainer.predict(fitted.module, held_out())
    rank = fitted.strategy.topology.rank
    right = fitted.module.eval().net(DATA[rank::4][0][:32])
    fitted.module.train()
    same = torch.equal(predictions[0], right)
    unchanged = mine == digest(fitted.module)
    fitted.trainer.fit_loop.max_epochs = 3
    fitted.trainer.fit(fitted.module, DataLoader(DATA, BATCH, shuffle=True))
    return {"sizes": sizes, "predicts": same, "unchanged": unchanged, "end": fitted.found}


class Stream(IterableDataset[Any]):
    """A stream that has one batch more on each rank than on the rank before."""

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank()
        yield from (DATA[i] for i in range((5 + rank) * BATCH))


def case_streams(folder: Path) -> Any:
    return fit(data=DataLoader(Stream(), BATCH), epochs=2, limit_train_batches=1.0).found


def case_by_name(folder: Path) -> Any:
    fitted = fit(strategy="hpcsgd", epochs=1)
    strategy: Any = fitted.trainer.strategy
    return [strategy.topology.num_groups, strategy.topology.group_size, strategy.optimizers[0].t]


def case_metrics(folder: Path) -> Any:
    fitted = fit(callbacks=[LogMetrics()], logger=CSVLogger(folder), log_every_n_steps=1, epochs=1)
    of_two = fit(lambda: Gan(toggles=True), callbacks=[LogMetrics()], epochs=1)
    logged = {name: float(value) for name, value in fitted.trainer.callback_metrics.items()}
    files = sorted(folder.rglob("metrics.csv"))
    return {
        "logged": logged,
        "sent": sent_in_steps(fitted.sent),
        "lines": files[0].read_text().splitlines() if files else [],
        "of two": sorted(of_two.trainer.callback_metrics),
    }


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except hpcsgd.UserError as error:
        return str(error)
    return "nothing was refused"


def case_refusals(folder: Path) -> Any:
    """Collect errors that all ranks raise before they communicate, so that the next case can run."""
    topology = hpcsgd.init(groups=2)
    sampler = hpcsgd.Sampler(DATA, topology)
    return {
        "devices": refused(lambda: fit(devices=2)),
        "nodes": refused(lambda: fit(num_nodes=2)),
        "unknown": refused(lambda: HpcsgdStrategy(groups=2, bucket_cap=3)),
        "renamed": refused(lambda: HpcsgdStrategy(groups=2, overlap=False)),
        "by the Trainer": refused(lambda: HpcsgdStrategy(groups=2, gradient_accumulation_steps=3)),
        "groups": refused(lambda: HpcsgdStrategy(groups=3)),
        "no method": refused(lambda: HpcsgdStrategy("hierarchical")),  # pyright: ignore[reportArgumentType]
        "one method": refused(lambda: fit(lambda: Gan(toggles=True), hierarchical(EVERY))),
        "sampler": refused(lambda: fit(data=DataLoader(DATA, BATCH, sampler=sampler))),
        "metrics": refused(lambda: fit(strategy="auto", devices=1, callbacks=[LogMetrics()])),
        "nothing to train": refused(lambda: fit(Untrained)),
        "precision": refused(lambda: fit(plugins=[Odd()])),
        "sync_batchnorm": refused(lambda: fit(sync_batchnorm=True)),
    }


class Untrained(Net):
    """A module without an optimizer."""

    def configure_optimizers(self) -> None:
        return None


class Odd(Precision):
    """A precision plugin of a third party."""


def case_docstrings(folder: Path) -> Any:
    """Run the examples in this package's docstrings that need several processes."""
    found = [0, 0]
    for documented in (HpcsgdStrategy, LogMetrics):
        for test in doctest.DocTestFinder().find(documented, globs={"hpcsgd": hpcsgd}):
            failed, tried = doctest.DocTestRunner().run(test)
            found = [found[0] + failed, found[1] + tried]
    return found


def case_method_object(folder: Path) -> Any:
    """One object of a method serves several trainings, each of which begins without state."""
    method = hpcsgd.diloco(EVERY)
    first: list[Fitted] = [fit(method=method) for _ in range(2)]
    return [each.found for each in first]
