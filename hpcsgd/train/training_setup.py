"""Build the objects of a training run that a job file names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hpcsgd import models
from hpcsgd.comm.backend_choice import place_on_node
from hpcsgd.comm.streams import on_accelerator
from hpcsgd.config.schema import Config, TrainingSection
from hpcsgd.core.fsdp import reshard
from hpcsgd.core.generators import seed_generators
from hpcsgd.core.topology import Topology
from hpcsgd.data import (
    Batches,
    Injected,
    InjectedBatches,
    Sampler,
    Split,
    crop_and_flip,
    reading,
    require_num_workers,
    varied,
)
from hpcsgd.engine.iterates import TRAIN, call_each, with_modes
from hpcsgd.engine.lr import WarmUp, lr_scale
from hpcsgd.engine.natural_gradient import NaturalGradient
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.engine.precision import Precision, precision
from hpcsgd.engine.scaling import require_scalable
from hpcsgd.errors import UserError, in_file, in_section
from hpcsgd.models.sharded import META, fully_shard, without_values
from hpcsgd.models.weights import load_into
from hpcsgd.named import annotations_of, build, call, resolve
from hpcsgd.report.step_timer import Sample
from hpcsgd.train.devices import Delivery, device_of
from hpcsgd.train.length import Length, length, tested
from hpcsgd.train.loading import loader_factory, opened
from hpcsgd.train.lr_schedule import make_scheduler, make_warm_up
from hpcsgd.train.model_flops import flops_of_sample
from hpcsgd.train.model_layout import compile_regions, lay_out
from hpcsgd.train.parts import OF_A_MODEL, make_method
from hpcsgd.train.tasks import Task, task_of
from hpcsgd.train.trial import require_model_fits

Transform = Callable[[Tensor, Generator], Tensor]
SENDING = ("bucket_cap_mb", "overlap_grad_reduce", "overlap_param_gather", "broadcast_buffers")
TRANSFORMS: Mapping[str, Transform] = {"crop_and_flip": crop_and_flip}


@dataclass
class TrainingSetup:
    """All objects of a training, ready to start."""

    model: nn.Module
    device: torch.device
    """The device of the model."""
    deliver: Delivery
    """Copies samples to the device."""
    task: Task
    precision: Precision
    optimizer: DistributedOptimizer
    warm_up: WarmUp
    scheduler: LRScheduler | None
    sampler: Sampler
    batches: Batches | InjectedBatches
    """The batches that are left in the current epoch of `sampler`."""
    loader: DataLoader[Any]
    injected: Injected | None
    """Completes the batches of `loader`, if groups share samples."""
    transform: Transform
    generator: Generator
    """This rank's random generator, with which `vary` changes samples."""
    train: Split
    test: Split
    steps_per_epoch: int
    length: Length
    tested: int
    """Number of samples of `test` that an evaluation uses."""
    sample: Sample
    by_torch: float | None
    """Bytes that torch sends per rank in a backward pass, if it shards the model (FSDP)."""
    natural_gradient: NaturalGradient | None
    """The natural gradient, which wraps `optimizer`, or None. Its hooks suffice; `step()` is not called."""

    def vary(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return these samples on the device, after the transform and the dataset's random changes."""
        x, y = varied(self.train, self.transform(x, self.generator), y, self.generator)
        return self.deliver(x), self.deliver(y)


def assemble(config: Config, topology: Topology, source: str, *, values: bool = True) -> TrainingSetup:
    """Return the objects that `config`, read from the file `source`, names, on this rank; collective.

    Without `values`, the parameters of an FSDP model get no values, because the model may be larger than
    this rank's memory. Raises `JobError`, which names file and key.
    """
    section, place, K = config.training, place_on_node(topology.world), topology.group_size
    with topology.raise_on_all_ranks("preparing the run"), in_file(source):
        with in_section("data"):
            require_num_workers(config.data.num_workers)
        train, test = opened(config.data, "train"), opened(config.data, "test")
        task = task_of(train)
        dealt = loader_factory(topology)
        sampler = dealt.sampler(train, config)
        batches = dealt.batches(sampler, config.data)
        transform = make_transform(config.data.transform)
        seed_generators(config.seed)  # all ranks build the same model; rank 0's values count
        model = make_model(config, reads=topology.rank == 0)
        device = device_of(section, place)
        bits = make_precision(section, device)
        if not values and config.parallel.fsdp:
            device = META
        sample = Sample(task.tokens, _flops(section, topology.rank, task, model, train), section.peak_tflops)

        def require_fitting() -> None:
            with bits.computing():  # a device need not have all operations in 16 bits
                require_model_fits(model, train, task, config.model.name, device)
            reshard(model)

        if not config.parallel.fsdp or device == META:
            model.to(device)
            require_fitting()
        lay_out(model, section, bits)
    if config.parallel.fsdp:
        with in_file(source):
            fully_shard(model, topology, config.model.fsdp_units, device=device, seed=config.seed)
    with topology.raise_on_all_ranks("preparing the run"), in_file(source):
        if config.parallel.fsdp and device != META:
            require_fitting()
        if section.compile:
            compile_regions(model)
        inner = make_optimizer(config, model, topology.total_groups)
        steps_per_epoch = len(batches)
        if topology.is_elastic and (section.steps or section.samples or section.tokens):
            raise UserError(
                "[training]: groups that `hpcsgd launch` starts go by epochs, not by steps", key=("training",)
            )
        how_long = length(section, batches, topology.world_size, task.tokens)
        enough = tested(section, len(test), task.tokens)
        method = make_method(config.method, steps_per_epoch, how_long.expected)
        if config.run.loggers:
            from hpcsgd.report.loggers import require_loggers

            require_loggers(config.run.loggers)
    own = config.seed + 1 + number_of(topology)
    seed_generators(own)  # from here on random numbers (dropout) differ between ranks
    optimizer = DistributedOptimizer(
        inner, model, topology, method, master_dtype=bits.master, **sending(section)
    )
    with topology.raise_on_all_ranks("preparing the run"), in_file(source):
        if bits.scaler is not None:
            with in_section("training", "precision"):
                require_scalable(optimizer)
        if config.lr_schedule.scale_with == "alive" and not topology.is_elastic:
            raise UserError(
                "[lr_schedule] scale_with = alive: needs elastic groups (ensemble_sync)",
                key=("lr_schedule", "scale_with"),
            )
        warm_up = make_warm_up(config.lr_schedule, optimizer, topology.total_groups, steps_per_epoch)
        scheduler = make_scheduler(config.lr_schedule, optimizer, how_long)
        natural_gradient = make_natural_gradient(config, optimizer, model)
    loader = reading(train, batches, config.data.num_workers, pinned=on_accelerator(device))
    return TrainingSetup(
        model=model,
        device=device,
        deliver=Delivery(device),
        task=task,
        precision=bits,
        optimizer=optimizer,
        warm_up=warm_up,
        scheduler=scheduler,
        sampler=sampler,
        batches=batches,
        loader=loader,
        injected=Injected(loader, topology) if batches.shares_samples else None,
        transform=transform,
        generator=Generator("cpu").manual_seed(own),
        train=train,
        test=test,
        steps_per_epoch=steps_per_epoch,
        length=how_long,
        tested=enough,
        sample=sample,
        by_torch=_bytes_by_torch(model, config.model.fsdp_units, K) if config.parallel.fsdp else None,
        natural_gradient=natural_gradient,
    )


def _flops(training: TrainingSection, rank: int, task: Task, model: nn.Module, data: Split) -> float | None:
    """Return the FLOPs of a sample on rank 0, which reports them; None on others or if not needed."""
    asked = task.tokens is not None or training.peak_tflops is not None
    return flops_of_sample(model, data.trial()) if asked and rank == 0 else None


def number_of(topology: Topology) -> int:
    """Return this rank's number among all ranks of all replica groups, which makes its seed differ.

    Ranks of replica groups with different sizes may have the same number.
    """
    return topology.replica_groups.index * topology.world_size + topology.rank


def sending(training: TrainingSection) -> dict[str, Any]:
    """Return the communication settings that the job file gives, as arguments of `DistributedOptimizer`."""
    given = {name: getattr(training, name) for name in SENDING}
    return {name: value for name, value in given.items() if value is not None}


def make_model(config: Config, *, reads: bool = True) -> nn.Module:
    """Build the model. If this rank `reads`, load the weights to start from, if any.

    On other ranks `DistributedOptimizer` or `fully_shard` sets the values. Those ranks may not have enough
    memory for a whole FSDP model.
    """
    section = config.model
    is_given_values_later = config.parallel.fsdp and (section.init_from is None or not reads)
    with without_values() if is_given_values_later else nullcontext():
        model = models.build(section.name, section.arguments)
    if section.init_from is not None and reads:
        with in_section("model", "init_from"):
            load_into(model, section.init_from)
    return model


def make_precision(training: TrainingSection, device: torch.device) -> Precision:
    with in_section("training"):
        return precision(training.precision, device)


def make_optimizer(config: Config, model: nn.Module, P: int) -> optim.Optimizer:
    name, arguments = config.optimizer.name, config.optimizer.arguments
    if "lr" in arguments:
        raise UserError(
            f"[optimizer.arguments]: lr = {arguments['lr']}: give it as lr of [optimizer], for one group",
            key=("optimizer", "arguments", "lr"),
            value=arguments["lr"],
        )
    lr = config.optimizer.lr * lr_scale(config.lr_schedule.scaling, P)
    of = model if _takes_model(name) else model.parameters()
    made = build("optimizer", name, OF_A_MODEL, {"lr": lr, **arguments}, optim.Optimizer, of)
    call_each(with_modes(made), TRAIN)  # averaged_model() evaluates, and returns to this mode
    return made


def _takes_model(name: str) -> bool:
    """Return whether the first parameter of the optimizer called `name` is annotated as a module."""
    with in_section("optimizer", "name"):
        annotations = list(annotations_of(resolve(name, OF_A_MODEL)).values())
    first = annotations[0] if annotations else None
    return isinstance(first, type) and issubclass(first, nn.Module)


def make_natural_gradient(
    config: Config, optimizer: optim.Optimizer, model: nn.Module
) -> NaturalGradient | None:
    arguments = config.optimizer.natural_gradient
    if arguments is None:
        return None
    with in_section("optimizer", "natural_gradient"):
        if config.training.activation_checkpointing:
            raise UserError(
                "activation_checkpointing: the natural gradient would see layers twice: give one of them"
            )
        return call(NaturalGradient, arguments, optimizer, model)


def make_transform(name: str | None) -> Transform:
    if name is None:
        return _unchanged
    with in_section("data", "transform"):
        return resolve(name, TRANSFORMS)


def _unchanged(x: Tensor, _: Generator) -> Tensor:
    return x


def _bytes_by_torch(model: nn.Module, units: Sequence[str] | None, K: int) -> float:
    from hpcsgd.train.by_torch import bytes_by_torch  # for FSDP models alone

    return bytes_by_torch(model, units, K)
