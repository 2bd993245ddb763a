"""A plan's estimates, simulated: the same seconds a step where nobody is late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcsgd.errors import UserError
from hpcsgd.planning.candidates import Option
from hpcsgd.planning.estimate import Estimate
from hpcsgd.planning.run import estimates
from hpcsgd.planning.scenario import scenario_of
from hpcsgd.simulation import simulate
from hpcsgd.simulation.scenario import load
from hpcsgd.training.subject import Subject
from planning.plans import machine_of, subject_of_ours

__all__ = ["subject_of_ours"]


def estimated(subject: Subject, table: dict[str, Any], N: int, P: int) -> Estimate:
    found, _ = estimates(subject, machine_of(), [Option(table)], [N], P)
    return next(e for e in found if e.P == P)


@pytest.mark.parametrize(("N", "P"), [(4, 2), (16, 4), (32, 16), (64, 8)])
@pytest.mark.parametrize(
    "table",
    [
        {"name": "bsp"},
        {"name": "hierarchical", "every": 4},
        {"name": "allreduce_local_sgd", "every": 8},
        {"name": "sgp"},
        {"name": "d_psgd"},
        {"name": "osgp", "staleness": 1},
        {"name": "delayed", "method": {"name": "hierarchical", "every": 4}, "steps": 2},
    ],
    ids=lambda table: table["name"],
)
def test_simulated_steps_take_what_was_estimated(
    subject_of_ours: Subject, tmp_path: Path, table: dict[str, Any], N: int, P: int
) -> None:
    e = estimated(subject_of_ours, table, N, P)
    file = tmp_path / "scenario.toml"
    file.write_text(scenario_of(e))
    seconds = simulate(load(file, ["--job.steps", "64"])).seconds / 64
    several = {"sgp": e.ranks_per_host > e.K, "osgp": e.ranks_per_host < e.K}
    if several.get(table["name"]):  # on a link: the plan has the mean of a period, and what else is there
        assert seconds <= e.step.seconds * (1 + 1e-9)
    else:  # the last message of osgp has no next step to hide behind
        assert seconds == pytest.approx(e.step.seconds, rel=1e-9, abs=2 * e.step.behind / 64)


def test_a_method_without_a_rule_is_refused(subject_of_ours: Subject) -> None:
    e = estimated(subject_of_ours, {"name": "diloco", "every": 4}, 16, 4)
    with pytest.raises(UserError, match=r"hpcsgd simulate knows ad_psgd, .* and not diloco"):
        scenario_of(e)
