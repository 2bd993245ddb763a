"""Loggers send a run's metrics to other programs, such as TensorBoard; ``[run] loggers`` names them."""

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
"""The key of a job file that names the loggers."""
LOGGERS: Mapping[str, MakeLogger] = {"mlflow": mlflow, "tensorboard": tensorboard, "wandb": wandb}
"""Loggers by name. A logger needs the library of the same name; hpcsgd's extra of that name installs it."""


def make_logger_of(described: str | Mapping[str, Any]) -> MakeLogger:
    """Return a function that starts the logger that a job file describes; no logger is started here.

    Raises `UserError` if there is no logger of that name, it does not accept the arguments, or its library
    is missing.
    """
    make = Parts({MakeLogger: LOGGERS}, steps_per_epoch=1).make(MakeLogger, described, *PLACE)
    name = name_of(described)
    if name in LOGGERS and not _is_installed(name):
        with in_section(*PLACE, name):
            raise UserError(f'needs the library `{name}`: pip install "hpcsgd[{name}]"')
    return make


def require_loggers(described: Sequence[str | Mapping[str, Any]]) -> None:
    """Raise `UserError` if one of the loggers that a job file describes cannot be started."""
    for each in described:
        make_logger_of(each)


def name_of(described: str | Mapping[str, Any]) -> str:
    """Return the logger's name in the job file, which `make_logger_of` has checked."""
    return described if isinstance(described, str) else str(described["name"])


def _is_installed(library: str) -> bool:
    found = find_spec(library)
    return found is not None and found.origin is not None  # None for a mere folder, such as wandb's


__all__ = ["LOGGERS", "Logger", "LoggerRun", "MakeLogger", "make_logger_of", "name_of", "require_loggers"]
