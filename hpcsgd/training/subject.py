"""What of a job file its cost goes by: samples, the model's parameters, what the optimizer keeps of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from hpcsgd import models
from hpcsgd.config.schema import Config, MethodSection
from hpcsgd.core.flat import BUCKET_MB
from hpcsgd.core.method import Method
from hpcsgd.core.traffic import Sizes
from hpcsgd.cost.machine import Machine, measured
from hpcsgd.engine.averaged import float_buffers
from hpcsgd.engine.in_parts import is_elementwise, is_tensorwise, seen_whole
from hpcsgd.engine.joined import parts_of
from hpcsgd.errors import UserError
from hpcsgd.training.assembly import make_optimizer
from hpcsgd.training.loading import opened
from hpcsgd.training.parts import make_method
from hpcsgd.training.tasks import task_of


@dataclass(frozen=True)
class Subject:
    """One training, on any number of ranks."""

    config: Config
    samples: int
    """Of an epoch."""
    model: nn.Module
    elementwise: bool
    """Or tensor by tensor: whether the positions of a group share the update."""
    whole: frozenset[nn.Parameter]
    """What the optimizer has to see whole."""
    moments: tuple[str, ...]
    """The optimizer's state tensors that are like a parameter."""
    state: float
    """How many of these an element has, on the mean: optimizers that are joined may keep unlike many."""
    numbers: tuple[str, ...]
    """Those of one number."""
    tokens: int | None = None
    """Of a sample, where that is known."""

    @property
    def B(self) -> int:
        return self.config.data.batch_size

    @property
    def M(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def steps_per_epoch(self, P: int) -> int:
        return self.samples // (P * self.B)

    def epochs(self, P: int) -> float:
        """Of the run: those of the job file, or what its steps, samples or tokens come to."""
        training = self.config.training
        if training.steps is not None:
            return training.steps / self.steps_per_epoch(P)
        if training.samples is not None:
            return training.samples / self.samples
        if training.tokens is not None:
            if self.tokens is None:
                raise UserError("[training] tokens: that the samples are made of them is not known here")
            return training.tokens / (self.samples * self.tokens)
        assert training.epochs is not None, "the schema asks for a length"
        return training.epochs

    def sizes(self, P: int, K: int, ranks_per_host: int) -> Sizes:
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        buffers, bucket = float_buffers(self.model), (self.config.training.bucket_mb or BUCKET_MB) * 1e6
        return Sizes.of(
            trained, P, K, bucket, self.moments, self.numbers, buffers, ranks_per_host,
            whole=self.whole if K > 1 else frozenset(),
        )  # fmt: skip

    def method(self, table: Mapping[str, Any], P: int) -> Method:
        """Raises `UserError` for arguments that the method does not take."""
        arguments = {key: value for key, value in table.items() if key != "name"}
        section = MethodSection(name=table["name"], arguments=arguments)
        return self.with_config(dataclasses.replace(self.config, method=section)).own_method(P)

    def own_method(self, P: int) -> Method:
        """That of the job file."""
        return make_method(self.config, self.steps_per_epoch(P))

    def with_config(self, config: Config) -> Subject:
        """The same model and samples, trained otherwise."""
        return dataclasses.replace(self, config=config)


def subject_of(config: Config, samples: int | None = None) -> Subject:
    """`samples`: of an epoch, for a job whose data are not here. Raises `UserError`, naming the key."""
    if samples is not None and samples < 1:
        raise UserError(f"--samples {samples}: at least 1 is needed")
    model = models.build(config.model.build, config.model.arguments)
    inner = make_optimizer(config, model, 1)
    states = [_state(type(part), part) for part in parts_of(inner)]
    sizes = [sum(p.numel() for g in part.param_groups for p in g["params"]) for part in parts_of(inner)]
    moments, numbers = (
        tuple(dict.fromkeys(name for x in each for name in x)) for each in zip(*states, strict=True)
    )
    train = None if samples is not None else opened(config.data, "train")
    return Subject(
        config=config,
        samples=samples or len(train or ()),
        model=model,
        elementwise=is_elementwise(inner) or is_tensorwise(inner),
        whole=frozenset(seen_whole(inner) if is_tensorwise(inner) else ()),
        moments=moments,
        state=sum(numel * len(names) for numel, (names, _) in zip(sizes, states, strict=True)) / sum(sizes),
        numbers=numbers,
        tokens=None if train is None else task_of(train).tokens,
    )


def require_same_model(subject: Subject, machine: Machine, file: Path) -> None:
    """Raise `UserError` where the machine file's computing times are another model's."""
    numel = measured(machine).numel
    if numel is not None and numel != subject.M:
        raise UserError(
            f"{file}: [compute] numel = {numel}: the job's model has {subject.M} parameters: measure this job"
        )


def _state(kind: type[optim.Optimizer], like: optim.Optimizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of what such an optimizer keeps of a parameter, found out by a step of it."""
    param = nn.Parameter(torch.zeros(2, 3))
    param.grad = torch.zeros_like(param)
    arguments = inspect.signature(kind).parameters
    made = kind([param], **{key: value for key, value in like.defaults.items() if key in arguments})
    made.step()
    tensors = {name: x for name, x in made.state[param].items() if isinstance(x, torch.Tensor)}
    moments = tuple(name for name, x in tensors.items() if x.shape == param.shape)
    return moments, tuple(name for name, x in tensors.items() if x.numel() == 1)
