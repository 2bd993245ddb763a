"""Where else a run's metrics go: whoever draws them, or keeps them for many runs. By ``[run] loggers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from hpcsgd.config.parts import Parts
from hpcsgd.errors import UserError, in_section
from hpcsgd.report.loggers.base import Logger, LoggerRun
from hpcsgd.report.loggers.mlflow import mlflow
from hpcsgd.report.loggers.tensorboard import tensorboard
from hpcsgd.report.loggers.wandb import wandb

MakeLogger = Callable[[LoggerRun], Logger]
PLACE = ("run", "loggers")
"""The key of a job file that names them."""
LOGGERS: Mapping[str, MakeLogger] = {"mlflow": mlflow, "tensorboard": tensorboard, "wandb": wandb}
"""Each needs the library of its name, which the extra of that name brings."""


def make_logger_of(said: str | Mapping[str, Any]) -> MakeLogger:
    """What a job file says of one, as a function that begins it for a run; nothing is begun here.

    Raises `UserError` where there is none of that name, where it does not take the arguments, or where its
    library is missing.
    """
    make = Parts({MakeLogger: LOGGERS}, steps_per_epoch=1).make(MakeLogger, said, *PLACE)
    name = name_of(said)
    if name in LOGGERS and not _is_installed(name):
        with in_section(*PLACE, name):
            raise UserError(f'needs the library `{name}`: pip install "hpcsgd[{name}]"')
    return make


def require_loggers(said: Sequence[str | Mapping[str, Any]]) -> None:
    """Raise `UserError` where one of them could not even begin."""
    for each in said:
        make_logger_of(each)


def name_of(said: str | Mapping[str, Any]) -> str:
    """As the job file has it, once `make_sink_of` has found nothing wrong."""
    return said if isinstance(said, str) else str(said["name"])


def _is_installed(library: str) -> bool:
    found = find_spec(library)
    return found is not None and found.origin is not None  # a folder of that name, as wandb makes, is none


__all__ = ["LOGGERS", "Logger", "LoggerRun", "MakeLogger", "make_logger_of", "name_of", "require_loggers"]
