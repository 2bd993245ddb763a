"""The time at which the batch scheduler ends the job that a run is in."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

log = logging.getLogger(__name__)

TIMEOUT = 20  # seconds for a command of a scheduler; a busy controller must not hold up the job
NEVER = 2**32 - 1
"""Seconds that Flux reports for a job without a time limit: UINT_MAX."""

PBS_END = "HPCSGD_PBS_END"
"""Environment variable that `train.pbs` sets: the requested end of the job, in seconds since 1970."""

Environ = Mapping[str, str]


def seconds_left(environ: Environ) -> float | None:
    """Return the seconds until a scheduler ends this job, or None if that is unknown or never happens.

    A job may run inside a job of another scheduler, such as Flux inside Slurm. Then the earlier end counts.
    """
    reported = (_said(scheduler, environ) for scheduler in _SCHEDULERS)
    return min((left for left in reported if left is not None), default=None)


@dataclass(frozen=True, slots=True)
class _Scheduler:
    title: str
    variable: str
    """The environment variable with the job's number."""
    left: Callable[[str, Environ], float | None]
    """A function that returns the seconds until the job ends, or raises as `subprocess.run` does."""


def _said(scheduler: _Scheduler, environ: Environ) -> float | None:
    if (job := environ.get(scheduler.variable)) is None:
        return None
    try:
        return scheduler.left(job, environ)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("the end of %s job %s is not known: %s", scheduler.title, job, error)
        return None


def _of_slurm(_: str, environ: Environ) -> float | None:
    """Return the seconds until Slurm ends this job.

    Newer versions of Slurm set an environment variable with the end; with older ones `scontrol` reports it.
    """
    reported = environ.get("SLURM_JOB_END_TIME", "")
    if reported.isdigit():
        end: float | None = float(reported)
    else:
        plain = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # users may have chosen another one
        end = slurm_end(_answer("scontrol", "show", "job", slurm_job(environ), environ=plain))
    return None if end is None else end - time.time()


def slurm_job(environ: Environ) -> str:
    """Return Slurm's name of this job, with its task if it is in a job array.

    The job number alone is ambiguous, because the last task has the same number as the whole array.
    """
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


def slurm_end(description: str) -> float | None:
    """Return `EndTime` in `scontrol`'s description of a job, in seconds since 1970, or None without end."""
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", description)
    return datetime.fromisoformat(found[1]).timestamp() if found else None


def _of_pbs(job: str, environ: Environ) -> float | None:
    """Return the seconds until PBS ends the job, by `qstat`, or by `PBS_END` if `qstat` fails."""
    try:
        end = pbs_end(_answer("qstat", "-f", job))
    except (OSError, subprocess.SubprocessError):
        if PBS_END not in environ:
            raise
        end = float(environ[PBS_END])
    return None if end is None else end - time.time()


def pbs_end(description: str) -> float | None:
    """Return the end of a job in seconds since 1970, from `stime` and `walltime` in `qstat -f`, or None."""
    began = re.search(r"^ *stime = (.+)$", description, re.MULTILINE)
    limit = re.search(r"^ *Resource_List\.walltime = (\d+):(\d\d):(\d\d)$", description, re.MULTILINE)
    if began is None or limit is None:
        return None
    hours, minutes, rest = (int(part) for part in limit.groups())
    begin = datetime.strptime(began[1].strip(), "%a %b %d %H:%M:%S %Y").timestamp()
    return begin + (hours * 60 + minutes) * 60 + rest


def _of_flux(_: str, environ: Environ) -> float | None:
    """Return the seconds left of the job that `flux run` made, or of the enclosing job if it ends first."""
    around = {name: value for name, value in environ.items() if name != "FLUX_JOB_ID"}
    left = min(int(_answer("flux", "job", "timeleft", environ=where)) for where in (environ, around))
    return None if left >= NEVER else float(left)


def _answer(*command: str, environ: Environ | None = None) -> str:
    done = subprocess.run(
        command, env=environ, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TIMEOUT,
    )  # fmt: skip
    return done.stdout


_SCHEDULERS = (
    _Scheduler("Slurm", "SLURM_JOB_ID", _of_slurm),
    _Scheduler("PBS", "PBS_JOBID", _of_pbs),
    _Scheduler("Flux", "FLUX_JOB_ID", _of_flux),
)
