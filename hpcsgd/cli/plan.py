"""``hpcsgd plan``: how long it will take, and on how many nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import told_in_one_line
from hpcsgd.cli.words import JobKeys


def plan(
    job: Path,
    /,
    *overrides: JobKeys,
    machine: Path,
    probe: Path | None = None,
    ranks: str | None = None,
    budget: float | None = None,
    deadline: float | None = None,
    methods: str | None = None,
    sync_every: str | None = None,
    sync_rate: float | None = None,
    samples: int | None = None,
    runs: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative="")] = (),
    scenario: Path | None = None,
    write: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Say what an epoch takes and costs by method, groups and ranks, and which of them to take.

    It says what steps cost, not what they learn: hpcsgd probe and hpcsgd compare do.

    :param job: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, as in --training.epochs 90.
    :param machine: The machine file that hpcsgd measure has written.
    :param probe: A probe.json: no more groups than it found; without, than the job file has.
    :param ranks: Which to try, as 64..4096 (doubling) or 64,96; by default one node up to all there are.
    :param budget: Node hours that the training may cost.
    :param deadline: Hours that it may take.
    :param methods: Which to try, as in bsp,sgp; by default the job file's and the usual ones.
    :param sync_every: Intervals to try, as in 4,8,16; by default the job file's.
    :param sync_rate: The share of steps after which groups meet, where the method goes by what it sees.
    :param samples: Of an epoch, where the data are not here.
    :param runs: Folders of runs that were, to be drawn beside the estimates.
    :param scenario: A file to write the recommended job to, for hpcsgd simulate.
    :param write: Put the recommended groups and method into the job file.
    """
    with told_in_one_line():
        from hpcsgd.performance.planning.choice import Limits
        from hpcsgd.performance.planning.run import run

        run(
            job, overrides, machine, probe=probe, ranks=ranks, methods=methods, every=sync_every,
            meets=sync_rate, samples=samples, wishes=Limits(budget, deadline),
            runs=runs, scenario=scenario, write=write,
        )  # fmt: skip
