"""The original settings: job files, and scripts for Slurm from the templates of `hpcsgd job`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from hpcsgd.cluster.batch import (
    Allocation,
    BatchJob,
    Checked,
    check_ensemble,
    check_training,
    load_site,
    prepare,
)
from hpcsgd.config.schema import load
from hpcsgd.core.topology import shape


@dataclass(frozen=True)
class Job:
    """One training of the original setting. `table` is its job file, with the bare name of its store."""

    name: str
    table: Mapping[str, Any]
    allocation: Allocation
    kind: str = "train"
    """Of `hpcsgd job`: train, bench or ensemble."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Values that the template of its kind alone has."""


def write(jobs: Sequence[Job], data: Path, out: Path) -> Iterator[BatchJob]:
    """NAME.toml in `out`, and beside the run folder out/runs/NAME its script. A job whose data are there is
    checked as `hpcsgd job` does; else its keys and its groups are, and that is said."""
    out.mkdir(parents=True, exist_ok=True)
    site, _ = load_site(None)
    for job in jobs:
        path = out.resolve() / f"{job.name}.toml"
        path.write_text(tomli_w.dumps(complete(job, data, out)))
        yield prepare(
            job.kind, [str(path)], _checked(job, path), job.allocation, site, own=job.more
        )  # fmt: skip


def complete(job: Job, data: Path, out: Path) -> dict[str, Any]:
    """Its job file, with the places of store and run."""
    table = {**job.table, "run": {"output_dir": str(out.resolve() / "runs" / job.name)}}
    return {**table, "data": {**table["data"], "path": str(data.resolve() / table["data"]["path"])}}


def _checked(job: Job, path: Path) -> Checked:
    config = load(path)
    if config.data.path.exists():
        check = check_ensemble if job.kind == "ensemble" else check_training
        return check(path, (), job.allocation, fresh=True)
    P, K = shape(job.allocation.ranks, config.parallel.groups, config.parallel.group_size)
    assert job.kind == "ensemble" or config.data.group_batch_size % K == 0, job.name
    return Checked(config, f"{P} groups of {K}; {config.data.path} is not there: only the file is checked")
