"""``hpcsgd plan``: the predicted time of a training, and the number of nodes to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import errors_in_one_line
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
    """Predict the time and cost of an epoch for several methods, groups and ranks; recommend one choice.

    It predicts the cost of steps, not what they learn: for that see hpcsgd probe and hpcsgd compare.

    :param job: The job file, as for hpcsgd train.
    :param overrides: Keys of the file to change, such as --training.epochs 90.
    :param machine: The machine file that hpcsgd measure has written.
    :param probe: A probe.json, which limits the number of groups; default: the job file's number of groups.
    :param ranks: Ranks to try, such as 64..4096 (doubling) or 64,96; default: from one node to all of
        MACHINE.
    :param budget: Node hours that the training may cost.
    :param deadline: Hours that it may take.
    :param methods: Methods to try, such as bsp,sgp; default: the job file's and the usual ones.
    :param sync_every: Intervals to try, such as 4,8,16; default: the job file's.
    :param sync_rate: Share of steps with a synchronization, if the method decides that during training.
    :param samples: Samples of an epoch, if the data are not here.
    :param runs: Folders of earlier runs, to draw next to the estimates.
    :param scenario: A file to write the recommended job to, for hpcsgd simulate.
    :param write: Put the recommended groups and method into the job file.
    """
    with errors_in_one_line():
        from hpcsgd.performance.planning.choice import Limits
        from hpcsgd.performance.planning.run import run

        run(
            job, overrides, machine, probe=probe, ranks=ranks, methods=methods, sync_every=sync_every,
            sync_rate=sync_rate, samples=samples, limits=Limits(budget, deadline),
            runs=runs, scenario=scenario, write=write,
        )  # fmt: skip
