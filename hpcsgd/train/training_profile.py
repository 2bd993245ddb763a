"""The properties of a job that decide its cost: samples, the model's parameters, the optimizer state."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from hpcsgd import models
from hpcsgd.config.reader import as_table
from hpcsgd.config.schema import Config
from hpcsgd.core.buffers import averaged_buffers
from hpcsgd.core.elements import num_reals
from hpcsgd.core.layout import bucket_bytes, nbytes
from hpcsgd.core.method import Method
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.machine import Machine, measured
from hpcsgd.engine.chained import parts_of
from hpcsgd.engine.dividing import uncut, update_of
from hpcsgd.engine.initial_state import step_at_rest
from hpcsgd.engine.muon_by_rows import periods
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import UserError, in_section
from hpcsgd.models.sharded import fsdp_units, without_values
from hpcsgd.train.families import method_of
from hpcsgd.train.loading import opened
from hpcsgd.train.tasks import task_of
from hpcsgd.train.training_setup import make_optimizer

Having = Mapping[str, Collection[nn.Parameter]]
"""For each name of a state tensor: the parameters that have such a tensor."""


@dataclass(frozen=True)
class TrainingProfile:
    """The properties of one training that decide its cost on any number of ranks."""

    config: Config
    samples: int
    """Number of samples of an epoch."""
    model: nn.Module
    optimizer: optim.Optimizer
    """The optimizer of the job file, for the model's parameters."""
    optimizer_state: Having
    """State tensors of the optimizer with the shape of a parameter."""
    numbers: Having
    """State tensors of the optimizer that hold a single number."""
    tokens: int | None = None
    """Tokens per sample, if known."""

    @property
    def B(self) -> int:
        return self.config.data.group_batch_size

    @property
    def M(self) -> int:
        return num_reals(p for p in self.model.parameters() if p.requires_grad)

    @property
    def state(self) -> float:
        """The mean number of state tensors per element; chained optimizers may keep different numbers."""
        return num_reals(p for having in self.optimizer_state.values() for p in having) / self.M

    @property
    def broadcast(self) -> int:
        """Bytes of the buffers that the first rank of a group sends to the others after each step."""
        wanted = self.config.training.broadcast_buffers
        return sum(x.nbytes for x in self.model.buffers()) if wanted else 0

    def steps_per_epoch(self, P: int) -> int:
        return self.samples // (P * self.B)

    def epochs(self, P: int) -> float:
        """Return the epochs of a run with P groups, from epochs, steps, samples or tokens in the job file."""
        training = self.config.training
        if training.steps is not None:
            return training.steps / self.steps_per_epoch(P)
        if training.samples is not None:
            return training.samples / self.samples
        if training.tokens is not None:
            if self.tokens is None:
                raise UserError(
                    "[training] tokens: the number of tokens per sample is not known here: give steps",
                    key=("training", "tokens"),
                )
            return training.tokens / (self.samples * self.tokens)
        assert training.epochs is not None, "the schema asks for a length"
        return training.epochs

    def steps(self, P: int) -> int:
        """Return the steps of a run with P groups."""
        given = self.config.training.steps
        return max(round(self.epochs(P) * self.steps_per_epoch(P)), 1) if given is None else given

    def plan(self, method: Method) -> StepPlan:
        """Return the plan by which the engine carries out a step of `method`."""
        return StepPlan.of(method, update_of(self.optimizer), by_torch=self.config.parallel.fsdp)

    def sizes(self, P: int, K: int, ranks_per_host: int, plan: StepPlan) -> ModelLayout:
        """Return the model's layout (buckets, buffers, FSDP units) under `plan` with P groups of K ranks."""
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        bucket = bucket_bytes(nbytes(p for _, p in trained), self.config.training.bucket_cap_mb)
        return ModelLayout.of(
            trained, P, K, bucket, self.optimizer_state, self.numbers, averaged_buffers(self.model),
            ranks_per_host, whole=uncut(plan, self.optimizer, K), units=self._units(),
            periods=periods(self.optimizer),
        )  # fmt: skip

    def _units(self) -> list[list[nn.Parameter]]:
        """Return the FSDP units, each of which torch gathers as a whole."""
        config = self.config
        if not config.parallel.fsdp:
            return []
        with in_section("model"):
            return [params for _, params in fsdp_units(self.model, config.model.fsdp_units)]

    def method(self, table: Mapping[str, Any], P: int) -> Method:
        """Return the method that `table` of a job file describes. Raises `UserError` for mistakes."""
        known = self.config.training.tokens is None or self.tokens is not None
        total_steps = self.steps(P) if known else None
        return method_of(table, self.steps_per_epoch(P), total_steps)

    def own_method(self, P: int) -> Method:
        """Return the method of the job file, for P groups."""
        return self.method(as_table(self.config.method), P)

    def with_config(self, config: Config) -> TrainingProfile:
        """Return a profile of the same model and samples with another `config`."""
        return dataclasses.replace(self, config=config)


def profile_of(config: Config, samples: int | None = None) -> TrainingProfile:
    """Return the profile of a job file. Raises `UserError`, which names the key.

    `samples` are those of an epoch, for a job whose data are not on this machine.
    """
    if samples is not None and samples < 1:
        raise UserError(f"--samples {samples}: at least 1 is needed")
    with without_values() if config.parallel.fsdp else nullcontext():
        model = models.build(config.model.name, config.model.arguments)
    inner = make_optimizer(config, model, 1)
    moments, numbers = state_of(inner)
    train = None if samples is not None else opened(config.data, "train")
    return TrainingProfile(
        config=config,
        samples=samples or len(train or ()),
        model=model,
        optimizer=inner,
        optimizer_state=moments,
        numbers=numbers,
        tokens=None if train is None else task_of(train).tokens,
    )


def require_same_model(subject: TrainingProfile, machine: Machine, file: Path) -> None:
    """Raise `UserError` if the computing times in the machine file were measured with another model."""
    numel = measured(machine).numel
    if numel is not None and numel != subject.M:
        raise UserError(
            f"{file}: [compute] numel = {numel}: the job's model has {subject.M} parameters: measure this job"
        )


def state_of(optimizer: optim.Optimizer) -> tuple[Having, Having]:
    """Return the optimizer's state tensors with their parameter's shape, and those with one number."""
    found = defaultdict[str, set[nn.Parameter]](set), defaultdict[str, set[nn.Parameter]](set)
    for part in parts_of(optimizer):
        for group in part.param_groups:
            trained = [p for p in group["params"] if p.requires_grad and p.numel()]
            kinds = {max(p.dim(), 1): _state(part, group, max(p.dim(), 1)) for p in trained}
            for p in trained:
                for having, names in zip(found, kinds[max(p.dim(), 1)], strict=True):
                    for name in names:
                        having[name].add(p)
    return found


def _state(like: optim.Optimizer, group: Mapping[str, Any], dim: int) -> tuple[list[str], list[str]]:
    """Return the names of the state that an optimizer keeps for a parameter with `dim` dimensions.

    The first list has tensors of the parameter's shape, the second tensors with one number. An optimizer of
    the same class makes a step on a small parameter to find the names.
    """
    param = nn.Parameter(torch.zeros((2, 3, *[1] * dim)[:dim]))
    param.grad = torch.zeros_like(param)
    arguments = inspect.signature(type(like)).parameters
    defaults = {key: value for key, value in like.defaults.items() if key in arguments}
    made = type(like)([{**group, "params": [param]}], **defaults)
    step_at_rest(made)
    tensors = {name: x for name, x in made.state[param].items() if isinstance(x, torch.Tensor)}
    moments = [name for name, x in tensors.items() if x.shape == param.shape]
    return moments, [name for name, x in tensors.items() if x.numel() == 1]
