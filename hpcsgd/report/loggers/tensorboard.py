"""The logger for TensorBoard: event files in ``loggers/tensorboard`` of the run folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from hpcsgd.report.loggers.base import Logger, LoggerRun, scalars, writable
from hpcsgd.report.metrics import Record


def tensorboard(run: LoggerRun) -> Logger:
    """Return the logger for `run`. ``tensorboard --logdir FOLDER`` shows all runs in a folder."""
    return _TensorBoard(run)


class _TensorBoard:
    """A writer of event files. Every start of a run has its own file, and TensorBoard joins them."""

    def __init__(self, run: LoggerRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        events: Any = event_pb2  # protobuf generates this module, without types
        self._event, self._summary = events.Event, cast("Any", summary_pb2).Summary
        self._writer = EventFileWriter(writable(run.folder, "tensorboard"))
        if run.resumed_step:  # TensorBoard discards what it has from this step on
            begins = events.SessionLog(status=events.SessionLog.START)
            self._writer.add_event(
                events.Event(step=run.resumed_step + 1, wall_time=time.time(), session_log=begins)
            )

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record)]
            event = self._event(
                step=record["step"], wall_time=time.time(), summary=self._summary(value=values)
            )
            self._writer.add_event(event)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()
