"""The logger for Weights & Biases: with an account, on your own server, or offline."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from hpcsgd.report.loggers.base import Logger, LoggerRun, scalars, writable
from hpcsgd.report.metrics import Record

Mode = Literal["online", "offline"] | None
AXIS = "at_step"
"""The metric on the horizontal axis of all plots. The steps of records may decrease, W&B's own may not."""


def wandb(run: LoggerRun, *, project: str = "hpcsgd", entity: str | None = None, mode: Mode = None) -> Logger:
    """Return the logger. `mode` is "online" or "offline", by default that of ``WANDB_MODE``.

    After an offline run, ``wandb sync`` sends the files in ``loggers/wandb`` of the run folder.
    """
    return _WandB(run, project, entity, mode)


class _WandB:
    """One run of W&B, with the same id whenever the run is resumed."""

    def __init__(self, run: LoggerRun, project: str, entity: str | None, mode: Mode) -> None:
        library: Any = import_module("wandb")  # may be missing when types are checked
        quiet = library.Settings(console="off", silent=True, login_timeout=1)  # never ask for a login
        self._run = library.init(
            id=run.id, name=run.name, group=run.group, config=dict(run.config), project=project,
            entity=entity, mode=mode, dir=writable(run.folder, ""), resume="allow", settings=quiet,
        )  # fmt: skip
        self._run.define_metric(AXIS, hidden=True)
        self._run.define_metric("*", step_metric=AXIS)

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({AXIS: record["step"], **dict(scalars(record))})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
