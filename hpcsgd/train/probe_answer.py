"""Use the result of a probe for a new training: the number of groups, and their expected distance."""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from pathlib import Path
from typing import Any

from hpcsgd.config.schema import Config, dump
from hpcsgd.errors import UserError, count_text
from hpcsgd.files.reading import read_json
from hpcsgd.report.run_folder import changes
from hpcsgd.train.monitor import DistanceMonitor

log = logging.getLogger(__name__)


def setting(config: Config) -> dict[str, Any]:
    """Return the part of `config` that decides the result of a probe."""
    table = tomllib.loads(dump(config))
    kept = {name: table[name] for name in ("data", "model", "optimizer", "lr_schedule", "method")}
    kept["data"].pop("num_workers", None)
    return {**kept, "training": {"precision": config.training.precision}}


def take_answer(config: Config, file: Path, ranks: int) -> tuple[Config, DistanceMonitor | None]:
    """Return `config` with the number of groups that the probe found, and a monitor of their distance.

    If that number does not divide `ranks`, the next smaller divisor is used. A warning is logged if the probe
    was of another training. Raises `UserError` if `file` is not the ``probe.json`` of a probe.
    """
    try:
        found = read_json(file)
        P, of = int(found["P"]), found["setting"]
        groups = fitting(P, ranks)
        monitor = DistanceMonitor.read(found, groups)
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(f"{file}: not the probe.json of a probe: {error}") from error
    if differing := changes(of, setting(config)):
        log.warning("%s was of another training: %s", file, differing)
    if found["unclear"] is not None:
        log.warning("%s: not clear between %d and %d groups", file, P, found["unclear"])
    log.info("%s: %s; %d for %s", file, count_text(P, "group"), groups, count_text(ranks, "rank"))
    parallel = dataclasses.replace(config.parallel, groups=groups, group_size=None)
    return dataclasses.replace(config, parallel=parallel), monitor


def fitting(P: int, ranks: int) -> int:
    """Return the largest number of groups up to `P` that divides `ranks`."""
    return max(d for d in range(1, min(P, ranks) + 1) if ranks % d == 0)
