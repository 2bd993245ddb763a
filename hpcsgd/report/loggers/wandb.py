"""For Weights & Biases: with an account, on a server of one's own, or offline, to be sent some other day."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from hpcsgd.report.loggers.base import Logger, LoggerRun, scalars, writable
from hpcsgd.report.metrics import Record

Mode = Literal["online", "offline"] | None
AXIS = "at_step"
"""What all is drawn against: records come in another order than W&B's own steps may."""


def wandb(run: LoggerRun, *, project: str = "hpcsgd", entity: str | None = None, mode: Mode = None) -> Logger:
    """`mode`: "online", or "offline": ``wandb sync`` sends what is in ``sinks/wandb`` of the run folder; else
    what ``WANDB_MODE`` says."""
    return _WandB(run, project, entity, mode)


class _WandB:
    """One run of W&B, by its id, whenever the run goes on."""

    def __init__(self, run: LoggerRun, project: str, entity: str | None, mode: Mode) -> None:
        library: Any = import_module("wandb")  # may not be there when types are checked
        quiet = library.Settings(console="off", silent=True, login_timeout=1)  # nobody is there to be asked
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
