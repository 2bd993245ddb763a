"""Settings of the gradient reduction that a job file leaves open: bucket size, overlap, reduction.

All choices give the same mean. They add in different orders, so that the last bits differ. The choice is
written into the job file in the run's folder, and a resumed run keeps it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcsgd.config.parts import NAME, alternatives
from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import Config, MethodSection, TrainingSection
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce, GroupGradReduce
from hpcsgd.methods import METHODS
from hpcsgd.named import annotations_of, resolve
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.report.run_folder import JOB_FILE

BUCKETS_MB = (1.0, 4.0, 25.0)
DENSE = ("alltoall", "reduce_scatter")
"""The names of gradient reductions that give the same mean, the usual one first."""


@dataclass(frozen=True)
class ReduceSettings:
    """A choice of bucket size in MB, overlap with the backward pass, and gradient reduction."""

    bucket_cap_mb: float
    overlap: bool
    grad_reduce: str | None = None
    """One of `DENSE`, or None if the gradient reduction is not open."""

    def within(self, config: Config) -> Config:
        settled = {"autotune_steps": None, "machine": None}
        training = replace(
            config.training, bucket_cap_mb=self.bucket_cap_mb, overlap_grad_reduce=self.overlap, **settled
        )
        arguments: Mapping[str, Any] = config.method.arguments
        for path in _missing_grad_reduces(config.method) if self.grad_reduce is not None else ():
            arguments = _with(arguments, path, self.grad_reduce)
        return replace(config, training=training, method=replace(config.method, arguments=dict(arguments)))

    def __str__(self) -> str:
        overlap = "true" if self.overlap else "false"
        text = f"bucket_cap_mb = {self.bucket_cap_mb:g}, overlap_grad_reduce = {overlap}"
        return text if self.grad_reduce is None else f"{text}, grad_reduce = {self.grad_reduce}"


@dataclass(frozen=True)
class Open:
    """The values to choose among for each open setting, the usual value first."""

    sizes: tuple[float, ...]
    overlaps: tuple[bool, ...]
    grad_reduces: tuple[str | None, ...]


def left_open(config: Config, K: int) -> Open:
    """Return the values to choose among for settings that `config` leaves open, with K ranks per group.

    Raises `UserError` for an unknown method.
    """
    training = config.training
    return Open(
        sizes=BUCKETS_MB if training.bucket_cap_mb is None else (training.bucket_cap_mb,),
        overlaps=(True, False) if training.overlap_grad_reduce is None else (training.overlap_grad_reduce,),
        grad_reduces=DENSE
        if K > 1 and not config.parallel.fsdp and _missing_grad_reduces(config.method)
        else (None,),  # with FSDP torch reduces gradients
    )


def is_to_choose(training: TrainingSection) -> bool:
    return training.autotune_steps is not None or training.machine is not None


def as_it_began(config: Config) -> Config:
    """Return `config`; if its folder has a run, with the open settings that this run chose at its start."""
    before = of_the_run(config) if is_to_choose(config.training) else None
    return config if before is None else before.within(config)


def of_the_run(config: Config) -> ReduceSettings | None:
    """Return the settings with which the run in the output folder began, or None without such a run."""
    file = config.run.output_dir / JOB_FILE
    reported = read_toml(file) if file.exists() else {"training": {}}
    training = reported["training"]
    if not {"bucket_cap_mb", "overlap_grad_reduce"} <= training.keys():
        return None
    grad_reduce = next((_at(reported["method"], path) for path in _missing_grad_reduces(config.method)), None)
    return ReduceSettings(
        training["bucket_cap_mb"],
        training["overlap_grad_reduce"],
        grad_reduce if grad_reduce in DENSE else None,
    )


def _missing_grad_reduces(section: MethodSection) -> list[Sequence[str]]:
    """Return the keys for a gradient reduction that the section leaves out, as paths into its arguments."""
    return list(_missing_in(section.name, section.arguments))


def _missing_in(name: str, given: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    function = resolve(name, METHODS)
    for key, annotation in annotations_of(function).items():
        kinds = alternatives(annotation)
        if key in given and Method in kinds:
            inner = _table(given[key])
            if isinstance(named := inner.get(NAME), str):
                yield from ([key, *path] for path in _missing_in(named, inner))
        elif key not in given and not {GradReduce, GroupGradReduce}.isdisjoint(kinds):
            yield from [[key]] if inspect.signature(function).parameters[key].default == Dense() else []


def _table(part: Any) -> Mapping[str, Any]:
    """Return the table of a method's part, also if `part` is only its name; an empty one for other values."""
    if isinstance(part, Mapping):
        return part
    return {"name": part} if isinstance(part, str) else {}


def _with(table: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**table, key: _with(_table(table[key]), rest, value) if rest else value}


def _at(table: Mapping[str, Any], path: Sequence[str]) -> Any:
    key, *rest = path
    return _at(_table(table.get(key)), rest) if rest else table.get(key)
