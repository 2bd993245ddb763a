"""Where else a run's metrics go: whoever draws them, or keeps them for many runs. By ``[run] loggers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from hpcsgd.config.parts import Parts
from hpcsgd.errors import UserError, in_section
from hpcsgd.report.sinks.base import Sink, SinkRun
from hpcsgd.report.sinks.mlflow import mlflow
from hpcsgd.report.sinks.tensorboard import tensorboard
from hpcsgd.report.sinks.wandb import wandb

MakeSink = Callable[[SinkRun], Sink]
PLACE = ("run", "loggers")
"""The key of a job file that names them."""
SINKS: Mapping[str, MakeSink] = {"mlflow": mlflow, "tensorboard": tensorboard, "wandb": wandb}
"""Each needs the library of its name, which the extra of that name brings."""


def make_sink_of(said: str | Mapping[str, Any]) -> MakeSink:
    """What a job file says of one, as a function that begins it for a run; nothing is begun here.

    Raises `UserError` where there is none of that name, where it does not take the arguments, or where its
    library is missing.
    """
    make = Parts({MakeSink: SINKS}, steps_per_epoch=1).make(MakeSink, said, *PLACE)
    name = name_of(said)
    if name in SINKS and not _is_installed(name):
        with in_section(*PLACE, name):
            raise UserError(f'needs the library `{name}`: pip install "hpcsgd[{name}]"')
    return make


def require_sinks(said: Sequence[str | Mapping[str, Any]]) -> None:
    """Raise `UserError` where one of them could not even begin."""
    for each in said:
        make_sink_of(each)


def name_of(said: str | Mapping[str, Any]) -> str:
    """As the job file has it, once `make_sink_of` has found nothing wrong."""
    return said if isinstance(said, str) else str(said["name"])


def _is_installed(library: str) -> bool:
    found = find_spec(library)
    return found is not None and found.origin is not None  # a folder of that name, as wandb makes, is none


__all__ = ["SINKS", "MakeSink", "Sink", "SinkRun", "make_sink_of", "name_of", "require_sinks"]
