"""Cases about the contents of checkpoints and about trainings that resume from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from behaviour import refused, weights
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from scene import EVERY, Fitted, Net, digest, fit
from torch import nn

import lightning
from hpcsgd.methods import diloco, hierarchical, sgp

METHODS: dict[str, Any] = {
    "hierarchical": lambda: hierarchical(EVERY),
    "diloco": lambda: diloco(8),
    "sgp": sgp,
}
FILES = {"hierarchical": ("last", "epoch", "after"), "diloco": ("epoch",), "sgp": ("epoch",)}
"""Files saved at the end of the last validation, at the end of the epoch, and after `fit`."""


def case_resume(folder: Path) -> Any:
    """Resume after 2 of 4 epochs, when the groups have different models; dropout draws random numbers."""
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        saved = fit(make_noisy, method, validate=True, callbacks=saves(folder / name))
        saved.trainer.save_checkpoint(folder / name / "after.ckpt")
        whole = fit(make_noisy, method, validate=True, epochs=4).found
        files = {each: folder / name / f"{each}.ckpt" for each in FILES[name]}
        resumed = {
            each: fit(make_noisy, method, validate=True, epochs=4, ckpt_path=file).found
            for each, file in files.items()
        }
        same = {each: of_file(file) == digest(saved.module) for each, file in files.items()}
        found[name] = {"whole": whole, "resumed": resumed, "averaged": same}
    found["kept"] = sorted(path.name for path in (folder / "diloco").iterdir())
    return found


def case_finished(folder: Path) -> Any:
    """Resume a training of which nothing is left, save it again, and make it longer."""
    saved = fit(validate=True, callbacks=[ModelCheckpoint(folder, "all")])
    finished = fit(validate=True, ckpt_path=folder / "all.ckpt")
    finished.trainer.save_checkpoint(folder / "again.ckpt")
    return {
        "averaged": digest(finished.module) == of_file(folder / "again.ckpt") == digest(saved.module),
        "longer": fit(validate=True, epochs=3, ckpt_path=folder / "again.ckpt").found,
        "whole": fit(validate=True, epochs=3).found,
    }


def make_noisy() -> Net:
    return Net(drop=0.3)


def saves(folder: Path) -> list[Callback]:
    """Return two callbacks, which Lightning distinguishes by `mode`."""
    options: dict[str, Any] = {"enable_version_counter": False}
    return [
        ModelCheckpoint(folder, "best", save_last=True, save_on_train_epoch_end=False, **options),
        ModelCheckpoint(folder, "epoch", save_on_train_epoch_end=True, mode="max", **options),
    ]


def of_file(path: Path) -> str:
    """Return the digest of the model in a checkpoint."""
    module = Net()
    module.load_state_dict(torch.load(path, weights_only=True, map_location="cpu")["state_dict"])
    return digest(module)


class SeesStep(Callback):
    """A callback that records the rank's own model and the averaged model after step 5."""

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any
    ) -> None:
        optimizer: Any = trainer.optimizers[0]
        if trainer.global_step == 5:
            self.own = digest(pl_module)
            with optimizer.averaged_model():
                self.averaged = digest(pl_module)


def case_within_an_epoch(folder: Path) -> Any:
    """Checkpoints between validations have the averaged model, too; training continues with the own one."""
    sees = SeesStep()
    every_five = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    fitted = fit(callbacks=[sees, every_five], epochs=1)
    return {
        "file": of_file(folder / "step=5.ckpt"), "averaged": sees.averaged, "own": sees.own,
        "end": fitted.found, "without": fit(epochs=1).found,
    }  # fmt: skip


class Begins(Callback):
    """A callback that records the weights with which a training begins."""

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.weights, self.t = weights(pl_module), trainer.optimizers[0].t  # pyright: ignore[reportAttributeAccessIssue]


def case_other_shape(folder: Path) -> Any:
    """On 4 groups of 1 rank, all begin with the mean of the 2 saved groups."""
    saved = fit(callbacks=[ModelCheckpoint(folder, "all")])
    begins = Begins()
    resumed = fit(groups=4, epochs=3, callbacks=[begins], ckpt_path=folder / "all.ckpt")
    difference = (begins.weights - weights(saved.module)).abs().max().item()
    return {"t": begins.t, "difference": difference, "end": resumed.found}


def case_of_another_strategy(folder: Path) -> Any:
    """Resume from a file without state of hpcsgd, whose optimizer state is that of a plain optimizer."""
    saved = fit(callbacks=[ModelCheckpoint(folder, "all")])
    path, other = folder / "all.ckpt", folder / "other.ckpt"
    plain = torch.optim.SGD(saved.module.parameters(), lr=0.25, momentum=0.9)
    nn.functional.mse_loss(weights_with_grad(saved.module), torch.zeros(())).backward()
    plain.step()
    if saved.strategy.topology.rank == 0:
        file = torch.load(path, weights_only=True)
        del file["hpcsgd"]
        torch.save({**file, "optimizer_states": [plain.state_dict()]}, other)
    saved.strategy.topology.world.barrier()
    seen: list[Any] = []

    class Looks(Callback):
        def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
            states = trainer.optimizers[0].state_dict()["state"]
            seen.append(torch.cat([states[n]["momentum_buffer"].reshape(-1) for n in sorted(states)]))

    fit(epochs=3, callbacks=[Looks()], ckpt_path=other)
    momenta = torch.cat([plain.state[p]["momentum_buffer"].reshape(-1) for p in saved.module.parameters()])
    return bool(torch.equal(seen[0], momenta))


def weights_with_grad(module: nn.Module) -> torch.Tensor:
    return sum((param**2).sum() for param in module.parameters())  # pyright: ignore[reportReturnType]


def case_bad_files(folder: Path) -> Any:
    """All ranks raise each error, and the communicators of earlier trainings still work."""
    first = fit(epochs=1, callbacks=[ModelCheckpoint(folder, "first")])
    fit(epochs=1, callbacks=[ModelCheckpoint(folder, "second")])
    if first.strategy.topology.rank == 0:
        shutil.rmtree(folder / "second.ckpt.ranks")
        shutil.copytree(folder / "first.ckpt.ranks", folder / "second.ckpt.ranks")
        shutil.copy(folder / "first.ckpt", folder / "third.ckpt")
    first.strategy.topology.world.barrier()

    def resume(name: str) -> str:
        return refused(lambda: fit(ckpt_path=folder / f"{name}.ckpt"))

    return {
        "of another": resume("second"),
        "alone": resume("third"),
        "weights only": weights_only(first, folder / "weights.ckpt"),
        "far": refused(lambda: first.trainer.save_checkpoint("memory://far.ckpt")),
    }


def weights_only(fitted: Fitted, path: Path) -> Any:
    fitted.trainer.save_checkpoint(path, weights_only=True)
    return [of_file(path) == digest(fitted.module), path.with_name(f"{path.name}.ranks").exists()]


def case_removed(folder: Path) -> Any:
    """Lightning removes older checkpoints together with the files of the ranks; the last one has a link."""
    newest = ModelCheckpoint(folder, "{epoch}", save_top_k=1, save_last="link")
    fitted = fit(epochs=3, callbacks=[newest])
    fitted.strategy.topology.world.barrier()
    names = sorted(path.name for path in folder.iterdir())
    return {"names": names, "end": fit(epochs=4, ckpt_path=folder / "last.ckpt").found}
