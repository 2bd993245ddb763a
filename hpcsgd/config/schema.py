"""The job file: frozen dataclasses, one per section of the TOML file, and their conversion to TOML.

Users read the docstring of each section and the comment after each key (website/job_file.py). A comment that
ends with "; default: …" gives a default that is not in the code.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w

from hpcsgd.config.kinds import Above, Minimum
from hpcsgd.config.overrides import Typed, overlay
from hpcsgd.config.reader import KEYS_BESIDE, as_table, read_section, read_toml
from hpcsgd.config.windows import windows
from hpcsgd.errors import UserError, require_utf8

Count = Annotated[int, Minimum(1)]
Seconds = Annotated[float, Above(0)]
TOKENIZER = "tokenizer"
"""The argument in [data] whose value is the path of a file, unless it is one of `NO_FILES`."""
NO_FILES = ("bytes",)


DeviceBackendName = Literal["auto", "mpi", "nccl", "gpu_mpi"]
BackendName = Literal["auto", "mpi", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBackendSection:
    """The library that sends tensors of GPUs. With "mpi" they are first copied to host memory."""

    intra_group: DeviceBackendName = "auto"  # for the ranks of one group
    inter_group: DeviceBackendName = "auto"  # for ranks with the same shard index, across groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """How the ranks form groups, by number or by size (if neither is given, the topology decides)."""

    groups: Count | None = None  # P, the number of groups; it has to divide the ranks of the job
    group_size: Count | None = None  # K, the ranks of one group, in place of groups
    fsdp: bool = False  # shards parameters and gradients over a group's ranks, by torch; docs/shard.md
    timeout_s: Seconds = 600.0  # the longest wait for other ranks, in seconds
    backend: BackendName = "auto"  # what connects the ranks: MPI, or gloo without MPI; docs/torchrun.md
    device_backend: DeviceBackendSection = field(default_factory=DeviceBackendSection)

    def __post_init__(self) -> None:
        if self.groups is not None and self.group_size is not None:
            raise UserError(
                f"groups = {self.groups} and group_size = {self.group_size}: give one of them, not both",
                key="groups",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """The samples: an HDF5 dataset file, and how it becomes batches."""

    path: Path  # made by `hpcsgd data convert`; relative to the job file
    group_batch_size: Count  # samples of one group in a step, a multiple of its ranks
    arguments: dict[str, Any] = field(default_factory=dict)  # how the file becomes samples; docs/data.md
    partition: dict[str, Any] | None = None  # name and arguments: how groups divide the samples
    overlap_share: Annotated[float, Above(0)] | None = None  # turns on the overlapping partition
    injection: dict[str, Any] | None = None  # alpha and beta: which part of batches is shared; docs/data.md
    transform: str | None = None  # a short name or "package.module:function"
    num_workers: Annotated[int, Minimum(0)] = 0  # loader processes of each rank; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The model, and its initial weights."""

    name: str  # a short name or "package.module:function"
    init_from: Path | None = None  # weights: a file or a folder, relative to the job file; docs/export.md
    fsdp_units: tuple[str, ...] | None = None  # modules that are sharded separately, such as "blocks.*"
    arguments: dict[str, Any] = field(default_factory=dict)  # the model's arguments, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """The optimizer that updates a group's model."""

    name: str = "SGD"  # a class of torch.optim, "Muon" or "package.module:function"
    lr: Annotated[float, Above(0)]  # the learning rate of one group
    arguments: dict[str, Any] = field(default_factory=dict)  # the optimizer's arguments, by name, except lr
    natural_gradient: dict[str, Any] | None = None  # arguments of NaturalGradient; docs/natural_gradient.md


@dataclass(frozen=True, slots=True, kw_only=True)
class LrScheduleSection:
    """The learning rate over time: scaling with the number of groups P, warm-up, then a torch scheduler."""

    scaling: Literal["none", "linear", "root"] = "none"  # the factor: 1, P or √P
    scale_with: Literal["started", "alive"] = "started"  # P: groups at the start, or alive groups
    warmup_epochs: Annotated[float, Minimum(0)] = 0.0  # it climbs from one group's rate; unscaled, from 0
    name: str | None = None  # a class of torch.optim.lr_scheduler or "package.module:function"
    arguments: dict[str, Any] = field(default_factory=dict)  # "length" as a value: the run's steps or epochs
    interval: Literal["epoch", "step"] = "epoch"  # how often the scheduler makes a step

    def __post_init__(self) -> None:
        if self.arguments and self.name is None:
            raise UserError("arguments without name: name the scheduler they are for", key="arguments")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSection:
    """The method; each of its arguments is a key of this section, too."""

    name: str  # a short name or "package.module:function"
    arguments: dict[str, Any] = field(default_factory=dict, metadata=KEYS_BESIDE)  # by name


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection:
    """How long to train, and how often to log, evaluate and save."""

    epochs: Count | None = None  # passes over the data
    steps: Count | None = None  # in place of epochs; the last epoch may end early
    samples: Count | None = None  # in place of epochs, of all ranks together
    tokens: Count | None = None  # in place of epochs, if samples consist of tokens
    log_every: Count = 10  # steps between two lines of log and metrics
    eval_every_epochs: Count = 1  # epochs between two evaluations
    eval_tokens: Count | None = None  # of the test data, spread over it; none: all
    checkpoint_every_steps: Count | None = None  # steps; none: at the end of every epoch
    time_limit_s: Seconds | None = None  # seconds until a run saves and stops; --resume continues
    stop_before_end_s: Seconds = 60.0  # seconds before its batch job ends at which a run saves and stops
    threads: Count | None = None  # torch threads of each rank; none: OMP_NUM_THREADS, or 1
    device: str = "auto"  # "cpu" or a kind of accelerator; auto: one that the rank sees, if any
    precision: Literal["fp32", "bf16", "fp16", "bf16_master"] = "fp32"  # of computing; docs/gpu.md
    channels_last: bool = False  # stores images and weights of convolutions with channels last
    compile: bool = False  # compiles the model by torch.compile, in regions; docs/gpu.md
    activation_checkpointing: bool = False  # recomputes what regions compute, instead of keeping it
    peak_tflops: Annotated[float, Above(0)] | None = None  # of a rank's device, to report utilization
    deterministic: bool = False  # only operations that give the same bits every time
    bucket_cap_mb: Annotated[float, Above(0)] | None = None  # MiB of a bucket; none: M/16, 1 to 4 MB
    overlap_grad_reduce: bool | None = None  # sends gradients during the backward pass; none: yes
    overlap_param_gather: bool = False  # gathers parameters during the next forward pass
    broadcast_buffers: bool = False  # a group's first rank sends the others its buffers; docs/buffers.md
    autotune_steps: Count | None = None  # steps to time each gradient reduction, to choose one
    machine: Path | None = None  # predicts the best gradient reduction; relative to the job file

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("steps", "samples", "tokens")}
        budgets = [f"{name} = {value}" for name, value in given.items() if value is not None]
        if len(budgets) > 1:
            first = next(name for name, value in given.items() if value is not None)
            raise UserError(f"{' and '.join(budgets)}: give one of them, not both", key=first)
        if self.epochs is None and not budgets:
            raise UserError("no length: give epochs, or steps, samples or tokens in their place")
        if self.overlap_param_gather and self.compile:
            message = "overlap_param_gather and compile: compiled code does not wait for weights: "
            raise UserError(message + "give one of them, not both", key="overlap_param_gather")
        if self.activation_checkpointing and self.compile:
            raise UserError(
                "activation_checkpointing and compile: compiled code chooses itself what to keep: "
                "give one of them, not both",
                key="activation_checkpointing",
            )
        if self.autotune_steps is not None and self.machine is not None:
            message = f"autotune_steps = {self.autotune_steps} and machine = {self.machine}: "
            raise UserError(message + "give one of them, not both", key="autotune_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSection:
    """How `hpcsgd launch` moves compute between groups, so that none waits for a slow one."""

    resource: Literal["none", "ranks", "samples", "threads"] = "none"  # what is moved
    total: Count | None = None  # of all groups: threads per rank, or samples per pass; ranks are counted
    min_gain: Annotated[float, Minimum(0)] = 0.1  # the part of an epoch that a move has to save
    cost_s: Annotated[float, Minimum(0)] | None = None  # seconds of a move; none: 20 for ranks, else 0

    def __post_init__(self) -> None:
        if self.resource in ("samples", "threads") and self.total is None:
            raise UserError(
                f"resource = {self.resource} without total: say how many {self.resource} there are in all",
                key="resource",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """What the run writes."""

    output_dir: Path  # relative to the working directory; default: runs/ and the name of the job file
    trace_steps: str | None = None  # steps that are traced: "10-17, 500", or "auto"; docs/trace.md
    loggers: tuple[str | dict[str, Any], ...] | None = None  # which also get the metrics; docs/loggers.md

    def __post_init__(self) -> None:
        if self.trace_steps is not None:
            windows(self.trace_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole training run, as `load` reads and checks it."""

    seed: Annotated[int, Minimum(0)] = 1  # seed of all random numbers, such as initial weights
    parallel: ParallelSection = field(default_factory=ParallelSection)
    data: DataSection
    model: ModelSection
    optimizer: OptimizerSection
    lr_schedule: LrScheduleSection = field(default_factory=LrScheduleSection)
    method: MethodSection
    training: TrainingSection
    rebalance: RebalanceSection = field(default_factory=RebalanceSection)
    run: RunSection

    def __post_init__(self) -> None:
        if not self.parallel.fsdp:
            if self.model.fsdp_units is not None:
                raise UserError(
                    "[model] fsdp_units without [parallel] fsdp = true: say that it is to be sharded",
                    key=("model", "fsdp_units"),
                )
            return
        for key, given in self._without_shards().items():
            if given:
                message = f"[parallel] fsdp = true and {key}: leave one of them out"
                raise UserError(message, key=("parallel", "fsdp"))

    def _without_shards(self) -> dict[str, bool]:
        """Return the settings that need whole parameters on every rank, each with whether it is used."""
        return {
            "[training] overlap_param_gather": self.training.overlap_param_gather,
            "[training] channels_last": self.training.channels_last,
            "[optimizer] natural_gradient": self.optimizer.natural_gradient is not None,
            '[rebalance] resource = "ranks"': self.rebalance.resource == "ranks",
        }


def unsharded(config: Config) -> Config:
    """Return `config` without FSDP: each rank has a whole model."""
    parallel = dataclasses.replace(config.parallel, fsdp=False)
    model = dataclasses.replace(config.model, fsdp_units=None)
    return dataclasses.replace(config, parallel=parallel, model=model)


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, merge ``--section.key value`` overrides into it and check everything.

    A relative ``data.path``, ``model.init_from``, ``training.machine`` or ``tokenizer`` of ``data.arguments``
    starts at the file's folder, or, as an override, at the working directory. Raises a one-line `UserError`
    that has what was given, what is allowed, and the flag or the file and key.
    """
    return checked(read_tables(path, overrides), path)


def read_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tables of a TOML file with the overrides, unchecked."""
    table = read_toml(path)
    overlay(table, overrides)
    return table


def checked(table: dict[str, Any], path: Path) -> Config:
    """Return the configuration in `table`, which was read from the file `path`; see `load`."""
    if isinstance(run := table.setdefault("run", {}), dict):
        run.setdefault("output_dir", f"runs/{path.stem}")
    config = read_section(Config, table, path)
    data, model, training = config.data, config.model, config.training
    data = dataclasses.replace(
        data,
        path=_absolute(data.path, table["data"]["path"], path),
        arguments=_with_paths(data.arguments, table["data"].get("arguments"), path),
    )
    if model.init_from is not None:
        init_from = _absolute(model.init_from, table["model"]["init_from"], path)
        model = dataclasses.replace(model, init_from=init_from)
    if training.machine is not None:
        machine = _absolute(training.machine, table["training"]["machine"], path)
        training = dataclasses.replace(training, machine=machine)
    return dataclasses.replace(config, data=data, model=model, training=training)


def _with_paths(arguments: dict[str, Any], in_table: Any, path: Path) -> dict[str, Any]:
    given = arguments.get(TOKENIZER)
    if not isinstance(given, str) or given in NO_FILES:
        return arguments
    typed = in_table if isinstance(in_table, Typed) else in_table[TOKENIZER]
    return {**arguments, TOKENIZER: str(_absolute(Path(given), typed, path))}


def _absolute(given: Path, in_table: Any, path: Path) -> Path:
    absolute = os.path.abspath(given if isinstance(in_table, Typed) else path.parent / given)
    require_utf8(absolute)
    return Path(absolute)


def dump(config: Config) -> str:
    """Return the configuration as TOML text, from which `load` returns an equal `Config`."""
    return tomli_w.dumps(as_table(config))
