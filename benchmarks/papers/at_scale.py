"""Job files of the original settings, and scripts for Slurm from the templates of `hpcsgd job`."""

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
    """One training of the original setting.

    `table` has the contents of its job file, in which the dataset's path is only a file name.
    """

    name: str
    table: Mapping[str, Any]
    allocation: Allocation
    kind: str = "train"
    """The kind of `hpcsgd job`: train, bench or ensemble."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Values that only the template of this kind has."""


def write(jobs: Sequence[Job], data: Path, out: Path) -> Iterator[BatchJob]:
    """Write the job file and the script of each job, and yield the batch jobs.

    The job file is NAME.toml in `out`. The script is next to the run folder out/runs/NAME. If the dataset
    exists, the job is checked as `hpcsgd job` does it. Otherwise only its keys and its groups are checked,
    and the printed text says so.
    """
    out.mkdir(parents=True, exist_ok=True)
    site, _ = load_site(None)
    for job in jobs:
        path = out.resolve() / f"{job.name}.toml"
        path.write_text(tomli_w.dumps(complete(job, data, out)))
        yield prepare(
            job.kind, [str(path)], _checked(job, path), job.allocation, site, own=job.more
        )  # fmt: skip


def complete(job: Job, data: Path, out: Path) -> dict[str, Any]:
    """Return the contents of the job file, with the paths of the dataset and the run folder."""
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
