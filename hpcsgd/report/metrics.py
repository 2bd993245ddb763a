"""The records of a run: one JSON object per line, written by rank 0, cut back on resume.

==============  ==========================================================================================
kind            fields in addition to ``kind`` and ``step``
==============  ==========================================================================================
``step``        epoch, loss, lr, samples, samples_per_s, phase_seconds and phase_bytes (dicts by phase),
                and progress: the epochs that are done, with the fraction of this one. Samples, seconds
                and bytes are those since the previous ``step`` record, so that their sums are the run's
                totals. If groups send each other messages: link_bytes, from rank 0 to each
                group. If the method counts something: counts, a dict by the name of the count that says how
                often each number occurred, over all ranks. If groups share gradients without averaging
                models: grads_shared, the number of steps in which they did. At a multiple of ``log_every``:
                gradient_norm of that step, the root of the mean over the groups of ‖g‖², where g is the
                gradient that the group's update used.
                If samples are made of tokens: tokens, counted like samples, and tokens_per_s. If known:
                flops, the model's for these samples, and utilization, the fraction of ``peak_tflops``.
                If torch shards the model (FSDP): bytes_by_torch, the computed bytes that it sent from
                rank 0. The record is written once all ranks have made the step, so it may follow records of
                later steps
``sync``        a synchronization; distance: D of eq. 9, the model distance of the groups before it
``method``      other metrics of the method in this step on rank 0, as numbers by name; the method's
                documentation says what they mean
``eval``        epoch, loss, distance (D of the groups from the tested model), seconds, and the figures of
                the task: accuracy, or perplexity and maybe bits_per_byte, or hr10 and ndcg10
``epoch``       epoch, loss, seconds
==============  ==========================================================================================
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from hpcsgd.errors import UserError, count_text
from hpcsgd.files.atomic import replacing
from hpcsgd.files.reading import parsed

log = logging.getLogger(__name__)

Record = dict[str, Any]


STEP_TABLES = ("phase_seconds", "phase_bytes", "link_bytes")


class Metrics:
    """A writer of records to a JSONL file. Each line is written whole, and can be read immediately.

    An error of the disk is not raised, but kept as `failure` until `require_written` is called.
    """

    def __init__(
        self, path: Path, *, resumed_step: int = 0, also: Callable[[bytes], None] | None = None
    ) -> None:
        """Open ``path`` and remove records of steps after ``resumed_step``, which will be made again.

        Damaged lines before are removed, too, with a warning. ``also`` is called with each new line. Raises
        `UserError` if all lines are damaged.
        """
        path.touch()
        self.evaluated_at = _cut(path, resumed_step)
        """The step of the last evaluation among the records that were kept, or None."""
        self._path, self._file = path, path.open("ab", buffering=0)
        self._also = also
        self.failure: OSError | None = None
        """The error of the first record that could not be written; later records are left out."""

    def step(
        self,
        *,
        step: int,
        epoch: int,
        loss: float,
        lr: float,
        samples: int,
        samples_per_s: float,
        phase_seconds: Mapping[str, float],
        phase_bytes: Mapping[str, float],
        link_bytes: Mapping[int, float],
        counts: Mapping[str, Mapping[int, int]],
        grads_shared: int = 0,
        **figures: float | None,
    ) -> None:
        """Append a step record.

        Samples, seconds, bytes, counts and ``grads_shared`` are those since the last ``step`` record; samples
        and counts are of all ranks. Fields that are empty, zero or unknown are left out, also in ``figures``.
        """
        speed = {"samples": samples, "samples_per_s": samples_per_s}
        phases = {"phase_seconds": dict(phase_seconds), "phase_bytes": dict(phase_bytes)}
        links = {"link_bytes": dict(link_bytes)} if link_bytes else {}
        counted = {"counts": dict(counts)} if counts else {}
        more = {**links, **counted, **({"grads_shared": grads_shared} if grads_shared else {})}
        more |= {name: value for name, value in figures.items() if value is not None}
        self._append("step", step=step, epoch=epoch, loss=loss, lr=lr, **speed, **phases, **more)

    def sync(self, *, step: int, distance: float) -> None:
        """Append a record of the synchronization after ``step``; ``distance`` is D before it (eq. 9)."""
        self._append("sync", step=step, distance=distance)

    def method(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the method's metrics of ``step``, if there are any."""
        assert not {"kind", "step"} & metrics.keys(), "these say which record it is"
        if metrics:
            self._append("method", step=step, **{name: float(value) for name, value in metrics.items()})

    def evaluation(
        self, *, step: int, epoch: int, loss: float, distance: float, seconds: float, **figures: float
    ) -> None:
        """Append the averaged model's result on test data, and the groups' distance D from that model."""
        score = {"loss": loss, **figures, "distance": distance, "seconds": seconds}
        self._append("eval", step=step, epoch=epoch, **score)

    def epoch(self, *, step: int, epoch: int, loss: float, seconds: float) -> None:
        """Append the end of an epoch after ``step``, with its mean training loss and duration."""
        self._append("epoch", step=step, epoch=epoch, loss=loss, seconds=seconds)

    def _append(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        try:
            if self.failure is None:
                self._write(line)
        except OSError as error:  # of rank 0 alone, which must not leave the other ranks
            self.failure = error
        if self.failure is None and self._also is not None:
            self._also(line)

    def require_written(self) -> None:
        """Raise `UserError` if a record could not be written."""
        if self.failure is not None:
            raise UserError(
                f"{self._path}: cannot be written: {self.failure.strerror}: make space on its disk, and pass "
                "--resume"
            ) from self.failure

    def _write(self, line: bytes) -> None:
        """Append `line`, or nothing: on a full disk the system may write its beginning."""
        end = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) < len(line):
            self._file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. All lines have been written already."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read(path: Path) -> list[Record]:
    """Return all records of the file in order, except a last line that a killed run left half written.

    Raises `UserError`, which names the line, if anything else is damaged.
    """
    return list(stream(path))


def stream(path: Path) -> Iterator[Record]:
    """Yield the same records as `read`, one at a time, so that a long file needs little memory."""
    return (record for _, record in _records(path))


def _cut(path: Path, step: int) -> int | None:
    """Remove the records of steps after `step`, and before them lines that are damaged, with one warning.

    Return the step of the last evaluation that is left. Raises `UserError` if all lines are damaged.
    """
    size, found, damaged, evaluated_at = 0, False, list[int](), None
    for number, (end, record) in enumerate(_lines(path), start=1):
        if isinstance(record, ValueError):
            damaged.append(number)
            continue
        found = True
        if record["step"] > step:
            break
        size = end
        evaluated_at = record["step"] if record["kind"] == "eval" else evaluated_at
    if damaged and not found:
        next(_records(path))  # raises
    os.truncate(path, size)
    if damaged:
        lost, first = count_text(len(damaged), "line"), damaged[0]
        log.warning("%s:%d: not a metrics record: removed %s to go on", path, first, lost)
        _rewrite(path, without=set(damaged))
    return evaluated_at


def _rewrite(path: Path, without: Collection[int]) -> None:
    """Remove the lines with these numbers. If this fails or is killed, the file stays as it is."""
    with replacing(path) as part, part.open("wb") as sound, path.open("rb") as file:
        sound.writelines(line for number, line in enumerate(file, start=1) if number not in without)


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield, for each record, the offset in the file at which its line ends, and the record."""
    for number, (end, found) in enumerate(_lines(path), start=1):
        if isinstance(found, ValueError):
            raise UserError(f"{path}:{number}: not a metrics record: {found}") from found
        yield end, found


def _lines(path: Path) -> Iterator[tuple[int, Record | ValueError]]:
    """Yield, for each whole line, the offset at which it ends, and its record, or why it is none."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                found = _require_sound(_as_today(parsed(line)))
            except ValueError as error:
                yield end, error
            else:
                yield end, found


_NEEDED: Mapping[str, Mapping[str, type]] = {
    "step": {
        **{"epoch": int, "loss": float, "lr": float, "samples": int, "samples_per_s": float},
        **{"phase_seconds": dict, "phase_bytes": dict},
    },
    "sync": {"distance": float},
    "eval": {"epoch": int, "loss": float},
}
"""The required fields of each kind of record. A float may be written without a fraction."""


def _require_sound(record: Record) -> Record:
    """Return `record`, or raise `ValueError` if hpcsgd does not write such records."""
    for name, kind in {"step": int, **_NEEDED.get(record["kind"], {})}.items():
        value = record.get(name)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"no {name!r}" if value is None else f"{name} = {value!r}")
    if record["step"] < 0:
        raise ValueError(f"step = {record['step']}")
    for name, value in record.items():
        if isinstance(value, dict):
            _require_numbers(name, value, _NUMBERED.get(name, 0))
        elif name not in ("kind", "step") and not isinstance(value, _PLAIN):
            raise ValueError(f"{name} = {value!r}")
    return record


_PLAIN = (int, float, str, type(None))
_NUMBERED = {"link_bytes": 1, "counts": 2}
"""Fields of dicts with whole numbers as keys, by level: the field itself (1), or the dicts in it (2)."""


def _require_numbers(name: str, table: Mapping[str, Any], numbered: int) -> None:
    for key, value in table.items():
        if numbered == 2 and isinstance(value, dict):
            _require_numbers(f"{name}.{key}", value, 1)
        elif type(value) not in (int, float) or numbered == 2 or (numbered and not key.isdecimal()):
            raise ValueError(f"{name}.{key} = {value!r}")


def _as_today(record: Any) -> Record:
    """Return the record in today's form. Older records have other kinds, and counts outside a dict."""
    if (
        not isinstance(record, dict)
        or not {"kind", "step"} <= record.keys()
        or type(record["kind"]) is not str
    ):
        raise ValueError("no kind and step in it")
    if record["kind"] in ("selection", "sparse"):
        return {**record, "kind": "method"}
    if record["kind"] == "step" and "counts" not in record:
        tables = {k: v for k, v in record.items() if isinstance(v, dict) and k not in STEP_TABLES}
        if tables:
            return {k: v for k, v in record.items() if k not in tables} | {"counts": tables}
    return record
