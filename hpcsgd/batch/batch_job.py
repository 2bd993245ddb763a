"""From a job file and an allocation to a script in Slurm's queue."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpcsgd.batch.allocation import Allocation
from hpcsgd.batch.precheck import Checked
from hpcsgd.batch.script import fill, template
from hpcsgd.batch.site import Site
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import replacing

TIMEOUT = 60  # seconds for an answer of sbatch
TEMPLATES = {"compare": "train"}
"""Of kinds of jobs that are started, stopped and resumed as another one is."""


@dataclass(frozen=True)
class BatchJob:
    """A script that is ready to be submitted, and what it will ask for."""

    script: Path
    allocation: Allocation
    placement: str
    starts: int
    """How often the job may start in all."""

    def __str__(self) -> str:
        a = self.allocation
        again = f" a start, and may start {self.starts} times" if self.starts > 1 else ""
        return "\n".join(
            [
                f"script    {self.script}",
                f"ranks     {a.ranks} on {a.nodes} nodes: {self.placement}",
                f"asks for  {a.nodes} nodes for {a.time}: {a.node_hours:.4g} node hours{again}",
            ]
        )


def prepare(
    kind: str,
    words: Sequence[str],
    checked: Checked,
    allocation: Allocation,
    site: Site,
    after: str | None = None,
    own: Mapping[str, str] = MappingProxyType({}),
) -> BatchJob:
    """The template `kind`, filled for the command line `words` of a checked job, beside the run folder.

    `own`: values that this template alone has.
    """
    run = checked.config.run.folder
    options = {
        "job-name": f"{run.name}-{kind}",
        "chdir": os.getcwd(),
        "output": f"{run}-{kind}-%j.log",
        **({} if after is None else {"dependency": f"afterok:{after}"}),
        **allocation.options(),
        **site.options(),
    }
    values = {
        "JOB": words,
        "PYTHON": sys.executable,
        "MODULES": site.modules,
        "SETUP": str(site.setup or ""),
        "MPI": site.mpi,
        "BIND": site.bindings(),
        "SRUN": site.srun,
        "ENVIRONMENT": site.variables(),
        "RUN": str(run),
        **own,
    }
    text = fill(template(TEMPLATES.get(kind, kind)), options, values)
    script = run.with_name(f"{run.name}-{kind}.sbatch")
    script.parent.mkdir(parents=True, exist_ok=True)
    with replacing(script) as part:
        part.write_text(text, encoding="utf-8")
    restarts = re.search(r"^MAX_RESTARTS=(\d+)", text, re.MULTILINE)
    return BatchJob(script, allocation, checked.placement, 1 + int(restarts[1]) if restarts else 1)


def estimate(script: Path) -> str | None:
    """When and where Slurm could start it; None where there is no Slurm.

    Raises `UserError` where Slurm would not take it.
    """
    if shutil.which("sbatch") is None:
        return None
    return _sbatch("--test-only", str(script)).removeprefix("sbatch: ")


def submit(script: Path) -> str:
    """Put it into the queue; the job's number."""
    if shutil.which("sbatch") is None:
        raise UserError(f"--submit: there is no sbatch here; where there is: sbatch {script}")
    return _sbatch("--parsable", str(script)).partition(";")[0]


def _sbatch(*arguments: str) -> str:
    command = ["sbatch", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{' '.join(command)}: no answer within {TIMEOUT} s") from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)}: {' '.join(said.split())}")
    return said
