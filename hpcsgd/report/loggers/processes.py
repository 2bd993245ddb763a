"""The loggers of a run, each in its own process. Training does not wait for loggers or fail with them.

The process of a logger runs ``__main__.py``, and a thread of rank 0 writes lines into the process's pipe. If
lines come faster than the logger reads them, some are left out. If the logger dies, the run continues. If the
logger does not end in time, it is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

from hpcsgd.config.schema import Config, as_table
from hpcsgd.files.atomic import replacing
from hpcsgd.report.loggers import LoggerRun, name_of

log = logging.getLogger(__name__)

FOLDER = "loggers"
"""Folder in the run's folder: the run's id, files of the loggers, and their output."""
WAITING = 10_000
"""Maximum number of waiting lines per logger. Further lines are left out."""
CLOSING, HURRY = 20.0, 2.0
"""Seconds that all loggers together have to finish: `CLOSING` usually, `HURRY` after the run has died."""
LAST = {False: b"false\n", True: b"true\n"}
"""The line after the last record, which ends the logger; it says whether the run has died.

The end of the pipe does not suffice, because forked processes may keep the pipe open.
"""


class LoggerProcesses:
    """The processes of all loggers of a run. Only rank 0 starts them."""

    def __init__(self, described: Sequence[str | Mapping[str, Any]], run: LoggerRun) -> None:
        """Start the loggers that a job file describes; `require_loggers` has checked them."""
        self._outlets = [
            _LoggerProcess(each, run, label)
            for each, label in zip(described, _labels(described), strict=True)
        ]

    def put(self, line: bytes) -> None:
        """Send a line of ``metrics.jsonl`` to all loggers; returns at once."""
        for outlet in self._outlets:
            outlet.put(line)

    def close(self, seconds: float = CLOSING, *, failed: bool = False) -> None:
        """Wait at most `seconds` until all loggers have written the lines of `put`. Call this once."""
        outlets, self._outlets = self._outlets, []
        deadline = time.monotonic() + seconds
        for outlet in outlets:
            outlet.end(failed)
        for outlet in outlets:
            outlet.join(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close(HURRY, failed=True)


def logger_run(folder: Path, config: Config, resumed_step: int) -> LoggerRun:
    """Return the description of the run or replica group in `folder`. The first start makes its id."""
    place = folder.absolute() / FOLDER
    place.mkdir(exist_ok=True)
    whole, file = config.run.output_dir, place / "id"
    if not file.exists():
        with replacing(file) as part:
            part.write_text(f"{os.urandom(6).hex()}\n")
    parts = folder.relative_to(whole).parts
    return LoggerRun(
        id=file.read_text().strip(),
        name="/".join([whole.name, *parts]),
        group=whole.name if parts else None,
        folder=str(place),
        resumed_step=resumed_step,
        config=as_table(config),
    )


def _labels(described: Sequence[str | Mapping[str, Any]]) -> list[str]:
    """Return the names of the loggers in messages and files; the second one of a name gets a number."""
    names = [name_of(each).rpartition(":")[2] for each in described]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}-{n + 1}" if n else name for name, n in zip(names, before, strict=True)]


class _LoggerProcess:
    """The process of one logger, and the thread that sends lines to it."""

    def __init__(self, described: str | Mapping[str, Any], run: LoggerRun, label: str) -> None:
        self._label = label
        self._first = json.dumps({"logger": described, "run": asdict(run)}, default=str).encode() + b"\n"
        self._printed = Path(run.folder) / f"{label}.log"
        self._lines = SimpleQueue[bytes | None]()
        self._left_out = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = self._given_up = False
        self._thread = Thread(target=self._serve, name=f"logger {label}", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        if self._ended:
            return
        if self._lines.qsize() < WAITING:
            self._lines.put(line)
        else:
            self._left_out += 1

    def end(self, failed: bool) -> None:
        self._lines.put(LAST[failed])
        self._lines.put(None)

    def join(self, deadline: float) -> None:
        """Wait until `deadline` (`time.monotonic`), then kill the process if it has not ended."""
        self._thread.join(max(deadline - time.monotonic(), 0))
        if self._thread.is_alive():
            self._given_up = True
            self._kill()
            self._thread.join(1.0)
            log.warning("logger %s: did not end in time; metrics.jsonl has all records", self._label)
        if self._left_out:
            log.warning(
                "logger %s: was too slow: %d lines were left out; metrics.jsonl has all records",
                self._label,
                self._left_out,
            )

    def _serve(self) -> None:
        try:
            fault = self._deliver()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run continues
            fault = f"{type(error).__name__}: {error}"
        self._ended = True
        if fault and not self._given_up:
            log.warning("logger %s: ended, and gets no more of this run: %s", self._label, fault)

    def _deliver(self) -> str:
        """Send lines until there are no more. Return the reason why the logger failed, or ""."""
        process = self._begin()
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(self._first)
            pipe.flush()
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                if self._lines.empty():
                    pipe.flush()
        code = process.wait()
        return f"{_last_line(self._printed)} ({self._printed})" if code else ""

    def _begin(self) -> subprocess.Popen[bytes]:
        """Start the logger's process in a session of its own, which signals to the run do not reach."""
        with self._printed.open("ab") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpcsgd.report.loggers"],
                stdin=subprocess.PIPE, stdout=printed, stderr=printed, start_new_session=True,
            )  # fmt: skip
        if self._given_up:
            self._kill()
        return self._process

    def _kill(self) -> None:
        """Kill the logger's process and all processes that it has started."""
        if self._process is not None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no output")
