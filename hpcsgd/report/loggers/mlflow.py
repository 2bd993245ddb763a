"""The logger for MLflow, which writes to a tracking server or to MLflow's local folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hpcsgd.report.loggers.base import Logger, LoggerRun, scalars
from hpcsgd.report.metrics import Record
from hpcsgd.report.run_folder import flat

TAG = "hpcsgd.run"
"""The tag that holds hpcsgd's id of the run, because MLflow gives runs ids of its own."""
AT_ONCE, PARAMS_AT_ONCE, LONGEST = 1000, 100, 500
"""Limits of MLflow: metrics per message, parameters per message, and letters of a parameter's text."""


def mlflow(run: LoggerRun, *, experiment: str = "hpcsgd", uri: str | None = None) -> Logger:
    """Return the logger for `run`. `uri` is a server or folder, by default ``MLFLOW_TRACKING_URI``."""
    return _MLflow(run, experiment, uri)


class _MLflow:
    def __init__(self, run: LoggerRun, experiment: str, uri: str | None) -> None:
        library: Any = import_module("mlflow")  # may be missing when types are checked
        self._metric = library.entities.Metric
        self._client = library.MlflowClient(tracking_uri=uri)
        before = self._client.get_experiment_by_name(experiment)
        place = before.experiment_id if before is not None else self._client.create_experiment(experiment)
        found = self._client.search_runs([place], filter_string=f"tags.`{TAG}` = '{run.id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {TAG: run.id, **({"hpcsgd.group": run.group} if run.group else {})}
        self._id = self._client.create_run(place, run_name=run.name, tags=tags).info.run_id
        params = [library.entities.Param(key, str(value)[:LONGEST]) for key, value in flat(run.config)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])

    def write(self, records: Sequence[Record]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(key, value, now, record["step"])
            for record in records
            for key, value in scalars(record)
        ]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[start : start + AT_ONCE])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
