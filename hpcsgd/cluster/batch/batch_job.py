"""Make a script from a job file and an allocation, and submit it to a scheduler."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpcsgd.cluster.batch.allocation import Allocation
from hpcsgd.cluster.batch.precheck import Checked
from hpcsgd.cluster.batch.scheduler import Order, Scheduler, scheduler_of
from hpcsgd.cluster.batch.script import fill, template
from hpcsgd.cluster.batch.site import Site
from hpcsgd.cluster.launch.python import of_ranks
from hpcsgd.errors import UserError, count_text
from hpcsgd.files.atomic import replacing

TIMEOUT = 60  # seconds to wait for an answer of the scheduler


@dataclass(frozen=True)
class BatchJob:
    """A script that is ready to be submitted, and the nodes that it requests."""

    scheduler: Scheduler
    script: Path
    allocation: Allocation
    placement: str
    starts: int
    """The largest number of starts, including those in which the job restarts itself."""
    tasks: int | None = None
    """The number of tasks of a job array; None for a single job."""

    def __str__(self) -> str:
        a = self.allocation
        times = "" if self.tasks is None else f"{self.tasks} × "
        hours = a.node_hours * (self.tasks or 1)
        again = f" a start, and may start {self.starts} times" if self.starts > 1 else ""
        return "\n".join(
            [
                f"script    {self.script}",
                f"ranks     {a.ranks} on {count_text(a.nodes, 'node')}: {self.placement}",
                f"asks for  {times}{count_text(a.nodes, 'node')} for {a.time}: "
                f"{count_text(hours, 'node hour')}{again}",
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
    tasks: int | None = None,
) -> BatchJob:
    """Write the script from the template `kind` for the command line `words`, next to the run folder.

    `own`: values that only this template has. `tasks`: the number of tasks of a job array, each of which gets
    `allocation`; None for a single job.
    """
    scheduler, run = scheduler_of(site), checked.config.run.output_dir
    text = template(scheduler.template(kind))
    script = run.with_name(f"{run.name}-{kind}{scheduler.suffix}")
    order = Order(
        name=f"{run.name}-{kind}",
        folder=Path.cwd(),
        log=run.with_name(f"{run.name}-{kind}"),
        script=script,
        after=after,
        allocation=allocation,
        site=site,
        tasks=tasks,
    )
    values = {
        "JOB": words,
        "PYTHON": _python(site),
        "MODULES": site.modules,
        "SETUP": str(site.setup or ""),
        "ENVIRONMENT": site.variables(),
        "RUN": str(run),
        **scheduler.values(order),
        **own,
    }
    text = fill(text, scheduler.options(order), values, scheduler.directives)
    script.parent.mkdir(parents=True, exist_ok=True)
    with replacing(script) as part:
        part.write_text(text, encoding="utf-8")
    restarts = re.search(r"^MAX_RESTARTS=(\d+)", text, re.MULTILINE)
    starts = 1 + int(restarts[1]) if restarts else 1
    return BatchJob(scheduler, script, allocation, checked.placement, starts, tasks)


def _python(site: Site) -> str:
    if site.pack is None:
        return of_ranks()
    pack = site.pack.expanduser().absolute()
    if not os.access(pack, os.X_OK):
        raise UserError(f"pack = {site.pack}: not a packed environment: hpcsgd job pack makes one")
    return str(pack)


def estimate(order: BatchJob) -> str:
    """Return, as text, when and where the scheduler could start the job, or why that is unknown.

    Raises `UserError` if the scheduler would reject the job.
    """
    scheduler = order.scheduler
    if not scheduler.is_here:
        return "not here: not asked whether it would take the job"
    if scheduler.tries is None:
        return "does not tell beforehand whether it would take the job"
    return _said(*scheduler.tries, str(order.script)).removeprefix(f"{scheduler.tries[0]}: ")


def submit(order: BatchJob) -> str:
    """Submit the script and return the job's number."""
    scheduler, script = order.scheduler, order.script
    if not scheduler.is_here:
        command = scheduler.submits[0]
        raise UserError(f"--submit: there is no {command} here; where there is: {by_hand(order)}")
    return _said(*scheduler.submits, str(script)).partition(";")[0]


def by_hand(order: BatchJob) -> str:
    """Return the command, as text, with which the user can submit the script."""
    words = [word for word in order.scheduler.submits if not word.startswith("-")]
    return shlex.join([*words, str(order.script)])


def _said(*command: str) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{' '.join(command)}: no answer within {TIMEOUT} s") from None
    output = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)}: {' '.join(output.split())}")
    return output
