"""The averaged model that a run has saved, at its end or in a checkpoint, read in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from hpcsgd import models
from hpcsgd.checkpoint import Checkpoints, Saved, restore_model
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import Config, load
from hpcsgd.core.topology import form
from hpcsgd.errors import UserError
from hpcsgd.models.weights import Weights, read
from hpcsgd.report.metrics import read as read_metrics
from hpcsgd.report.run_folder import CHECKPOINTS, JOB_FILE

MODEL = "model.pt"


@dataclass(frozen=True)
class SavedModel:
    """The averaged model that a run of `config` has saved in `source`, after `step` steps (if known)."""

    config: Config
    run: Path
    source: Path
    step: int | None
    _read: Callable[[], Weights]

    @cached_property
    def weights(self) -> Weights:
        """The weights by their names in `state_dict`. Tied weights are one tensor with two names."""
        return self._read()

    def model(self) -> nn.Module:
        """Return a new model with `weights`, in the dtypes of the weights."""
        model = built(self.config)
        for name, value in model.state_dict(keep_vars=True).items():
            if name in self.weights:
                value.data = value.data.to(self.weights[name].dtype)
        model.load_state_dict(self.weights)
        return model

    @property
    def origin(self) -> dict[str, str]:
        """Facts about the model's origin, which every export format includes."""
        return {
            "hpcsgd": version("hpcsgd"),
            "step": "unknown" if self.step is None else str(self.step),
            "method": self.config.method.name,
            "job": hashlib.sha256((self.run / JOB_FILE).read_bytes()).hexdigest(),
        }


def saved_by(run: Path) -> SavedModel:
    """Return the averaged model of the run in the folder `run`.

    Raises `UserError` if `run` is not the folder of a run, or if the run has saved no model yet.
    """
    if not (run / JOB_FILE).is_file():
        raise UserError(f"{run}: not the folder of a run: there is no {JOB_FILE}")
    config, model = load(run / JOB_FILE), run / MODEL
    if model.is_file() and not _went_on(run, model):
        return SavedModel(config, run, model, _last_step(run), lambda: read(model))
    saved = newest(run / CHECKPOINTS)
    if saved is None:
        raise UserError(f"{run}: neither {MODEL} nor a checkpoint: there is no model yet")
    return SavedModel(config, run, saved.path, saved.step, lambda: _averaged(config, saved))


def built(config: Config) -> nn.Module:
    """Return a new model as `config` describes it, with the memory layout that the run uses."""
    model = models.build(config.model.name, config.model.arguments)
    if config.training.channels_last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch has no type for it
    return model


def newest(folder: Path) -> Saved | None:
    """Return the newest checkpoint that is whole; see `Checkpoints.newest`."""

    def on_one_rank(world: Communicator) -> Saved | None:
        return Checkpoints(folder, form(world)).newest()

    return threads.run(1, on_one_rank)[0]


def _averaged(config: Config, saved: Saved) -> Weights:
    model = built(config)
    restore_model(saved, model)
    return dict(model.state_dict())


def _went_on(run: Path, model: Path) -> bool:
    """Return whether `run` was resumed after it saved `model`, by the times of its checkpoints."""
    written = model.stat().st_mtime_ns
    manifests = (run / CHECKPOINTS).glob("step-*/manifest.json")
    return any(manifest.stat().st_mtime_ns > written for manifest in manifests)


def _last_step(run: Path) -> int | None:
    metrics = run / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.is_file() else []
    return max((record["step"] for record in records), default=None)
