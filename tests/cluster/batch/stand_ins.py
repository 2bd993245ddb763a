#!/usr/bin/env python3
"""Stand-ins for the commands of PBS and Flux, with the options and output that the templates use.

`python stand_ins.py ROOT COMMAND …` runs one of the commands. A test uses a `Queue` in place of the server.

qsub(1B) of OpenPBS: directives come after "#PBS". -v exports variables by name or as name=value, and the job
inherits nothing else. -W depend=afterany:ID waits for the end of ID. qsub prints the job's number. The script
runs from a copy, in the home folder, with PBS_JOBID and PBS_O_WORKDIR. qstat(1B) -f prints `stime` and
`Resource_List.walltime`. A job that is preempted, or whose node is lost, runs again under its number (-r y).
qrerun(1B) is for operators only, so there is no stand-in for it.

flux-batch(1): directives come after "# flux:". It copies the script and the environment, to which
--env=NAME=VALUE adds. Words after the script are its arguments. --dependency=afterany:ID waits for the end of
ID. flux-environment(7): the script has no FLUX_JOB_ID. `flux getattr jobid` prints its number, and
`flux --parent` addresses the enclosing instance. flux-job(1): `timeleft` prints seconds, and `id` prints a
number in plain form. flux-run(1) starts ranks with FLUX_TASK_RANK and PMI."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOUR = 3600.0
# The variables that a job has by logging in if it inherits nothing, and those that the tests need.
LOGIN = ("HOME", "PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Queue:
    """The jobs, each a file in `root`, and the commands in `root`/bin."""

    root: Path
    flux: bool

    @property
    def name(self) -> str:
        return "flux" if self.flux else "pbs"

    def install(self) -> None:
        (self.root / "bin").mkdir(parents=True)
        for name in ["flux"] if self.flux else ["qsub", "qstat"]:
            path = self.root / "bin" / name
            words = [sys.executable, "-I", __file__, str(self.root), name]
            path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            path.chmod(0o755)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a user who submits jobs."""
        return {**environ, "PATH": f"{self.root / 'bin'}{os.pathsep}{environ['PATH']}"}

    def read(self, number: str) -> dict[str, Any]:
        return json.loads((self.root / f"{number}.job").read_text())

    def write(self, number: str, job: Mapping[str, Any]) -> None:
        (self.root / f"{number}.job").write_text(json.dumps(job))

    def add(self, **job: Any) -> str:
        number = str(1 + len([*self.root.glob("*.job")]))
        number = number if self.flux else f"{number}.pbs"
        self.write(number, {"ended": False, **job})
        return number

    def waiting(self) -> list[str]:
        """Return the jobs that may start: they have not ended, and the job that they wait for has."""
        numbers = sorted(path.stem for path in self.root.glob("*.job"))
        ended = {number for number in numbers if self.read(number)["ended"]}
        return [n for n in numbers if n not in ended and self.read(n)["after"] in {None, *ended}]

    def run(self, number: str, left: float = HOUR, *, again: bool = False) -> int:
        """Start a job that has `left` seconds left, wait for its end, and return its exit code.

        With `again` the job is not over after that, like a job that is preempted.
        """
        import programs  # imported here, since the commands run as `python -I`, which does not find it

        job = self.read(number)
        job["end"] = time.time() + left
        self.write(number, job)
        copy = self.root / f"{number}.copy"
        copy.write_text(job["script"])
        command = ["bash", copy, *job["words"]]
        inside = self._inside(number, job)
        done = programs.run(command, cwd=job["folder"], env=inside, timeout=300, check=False)
        print(f"{done.stdout}{done.stderr}")
        self.write(number, job | {"ended": not again})
        return done.returncode

    def _inside(self, number: str, job: Mapping[str, Any]) -> dict[str, str]:
        if self.flux:
            return {**job["variables"], "FLUX_URI": f"local://{number}", "STAND_IN_JOB": number}
        login = {name: os.environ[name] for name in LOGIN if name in os.environ}
        here = {"PBS_JOBID": number, "PBS_O_WORKDIR": job["submitted_in"], "PBS_ENVIRONMENT": "PBS_BATCH"}
        return self.environment(login) | job["variables"] | here


def directives(script: str, sentinel: str) -> list[str]:
    lines = [line.removeprefix(sentinel) for line in script.splitlines() if line.startswith(sentinel)]
    return [word for line in lines for word in shlex.split(line)]


def after(dependency: str) -> str | None:
    kind, _, number = dependency.partition(":")
    assert kind in {"", "afterany", "afterok"}, dependency
    return number or None


def qsub(queue: Queue, words: list[str]) -> str:
    script = Path(words.pop()).read_text()
    given = [*directives(script, "#PBS "), *words]  # later options take precedence
    pairs = list(zip(given[::2], given[1::2], strict=True))
    assert all(len(name) == 2 and name[0] == "-" for name, _ in pairs), given
    attributes = dict(value.split("=", 1) for name, value in pairs if name in {"-W", "-l"})
    variables = {}
    for each in [each for name, value in pairs if name == "-v" for each in value.split(",")]:
        name, equals, value = each.partition("=")
        variables[name] = value if equals else os.environ[name]
    return queue.add(
        script=script, words=[], folder=os.environ["HOME"], submitted_in=os.getcwd(), variables=variables,
        after=after(attributes.get("depend", "")), walltime=attributes["walltime"],
    )  # fmt: skip


def qstat(queue: Queue, words: list[str]) -> str:
    option, number = words
    assert option == "-f"
    job = queue.read(number)
    hours, minutes, seconds = (int(part) for part in job["walltime"].split(":"))
    began = time.localtime(job["end"] - (hours * 60 + minutes) * 60 - seconds)
    stime = time.strftime("%a %b %d %H:%M:%S %Y", began)
    return f"Job Id: {number}\n    Resource_List.walltime = {job['walltime']}\n    stime = {stime}"


def flux(queue: Queue, words: list[str]) -> str:
    here = os.environ.get("STAND_IN_JOB", "")
    if words[0] == "run":
        return flux_run(words[1:])
    if words == ["getattr", "jobid"]:
        return f"f{here}"
    if words[:2] == ["job", "id"]:
        return words[2].removeprefix("f")
    if words == ["job", "timeleft"]:
        return str(2**32 - 1 if "FLUX_JOB_ID" in os.environ else round(queue.read(here)["end"] - time.time()))
    assert (words[0] == "--parent") == bool(here), "from inside, a job goes to where this one came from"
    return flux_batch(queue, words[2:] if here else words[1:])


def flux_batch(queue: Queue, words: list[str]) -> str:
    first = next(i for i, word in enumerate(words) if not word.startswith("--"))
    script = Path(words[first]).read_text()
    given = [word.partition("=") for word in [*directives(script, "# flux: "), *words[:first]]]
    options = {name: value for name, _, value in given}
    own = {name: value for name, value in os.environ.items() if not name.startswith(("FLUX_", "STAND_IN"))}
    added = dict([options["--env"].split("=", 1)]) if "--env" in options else {}
    return queue.add(
        script=script, words=words[first + 1 :], folder=options.get("--cwd", os.getcwd()),
        variables=own | added, after=after(options.get("--dependency", "")),
    )  # fmt: skip


def flux_run(words: list[str]) -> str:
    """Run ranks with MPICH's mpiexec, and set Flux's variables from its own."""
    program = next(i for i, word in enumerate(words) if not word.startswith("-") and "=" not in word)
    (ranks,) = (word.partition("=")[2] for word in words if word.startswith("--ntasks="))
    rank = f'export FLUX_JOB_ID=f0 FLUX_JOB_SIZE={ranks} FLUX_TASK_RANK=$PMI_RANK; exec "$@"'
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    os.execvp(mpiexec, [mpiexec, "-n", ranks, "sh", "-c", rank, "sh", *words[program:]])


def main(root: str, command: str, *words: str) -> None:
    queue = Queue(Path(root), flux=command == "flux")
    print({"qsub": qsub, "qstat": qstat, "flux": flux}[command](queue, list(words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
