"""What a run has to know of the Slurm job it is in."""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime

log = logging.getLogger(__name__)

TIMEOUT = 20  # seconds; a busy controller must not hold up the job


def seconds_left(environ: Mapping[str, str]) -> float | None:
    """Until Slurm ends this job; None outside of one, and where that cannot be found out or never happens.

    Newer versions tell in the environment, older ones only when asked.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    told = environ.get("SLURM_JOB_END_TIME", "")
    end = float(told) if told.isdigit() else _asked(job)
    return None if end is None else end - time.time()


def _asked(job: str) -> float | None:
    command = ["scontrol", "show", "job", job]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the end of Slurm job %s is not known: %s", job, error)
        return None
    return end_time(done.stdout)


def end_time(description: str) -> float | None:
    """`EndTime` in what scontrol says of a job, in seconds since 1970; None where it has no end."""
    found = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", description)
    return datetime.fromisoformat(found[1]).timestamp() if found else None
