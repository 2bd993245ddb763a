"""A plan's estimates, simulated: steps take the same seconds if no group is late."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpcsgd.errors import UserError
from hpcsgd.performance.planning.candidates import Option
from hpcsgd.performance.planning.estimate import Estimate
from hpcsgd.performance.planning.run import estimates
from hpcsgd.performance.planning.scenario import scenario_of
from hpcsgd.performance.simulation import simulate
from hpcsgd.performance.simulation.scenario import load
from hpcsgd.train.training_profile import TrainingProfile
from performance.planning.plans import machine_of, subject_of_ours

__all__ = ["subject_of_ours"]


def estimated(subject: TrainingProfile, table: dict[str, Any], N: int, P: int) -> Estimate:
    found, _ = estimates(subject, machine_of(), [Option(table)], [N], P)
    return next(e for e in found if e.P == P)


@pytest.mark.parametrize(("N", "P"), [(4, 2), (16, 4), (32, 16), (64, 8)])
@pytest.mark.parametrize(
    "table",
    [
        {"name": "bsp"},
        {"name": "hierarchical", "sync_every": 4},
        {"name": "allreduce_local_sgd", "sync_every": 8},
        {"name": "sgp"},
        {"name": "d_psgd"},
        {"name": "osgp", "overlap_steps": 1},
        {"name": "delayed", "method": {"name": "hierarchical", "sync_every": 4}, "sync_delay": 2},
        {"name": "diloco", "sync_every": 4},
        {
            "name": "streaming",
            "method": {"name": "diloco", "sync_every": 4},
            "num_fragments": 2,
            "sync_delay": 1,
        },
        {
            "name": "streaming",
            "method": {"name": "diloco", "sync_every": 8},
            "num_fragments": 4,
            "sync_delay": 4,
        },
        {"name": "noloco", "sync_every": 4},
        {"name": "fedavg", "per_epoch": 3, "steps_per_epoch": 8},
        {"name": "switch", "first": {"name": "bsp"}, "then": {"name": "d_psgd"}, "at": 0},
    ],
    ids=lambda table: table["name"],
)
def test_simulated_steps_take_what_was_estimated(
    subject_of_ours: TrainingProfile, tmp_path: Path, table: dict[str, Any], N: int, P: int
) -> None:
    e = estimated(subject_of_ours, table, N, P)
    file = tmp_path / "scenario.toml"
    file.write_text(scenario_of(e))
    seconds = simulate(load(file, ["--job.steps", "64"])).seconds / 64
    several = {"sgp": e.ranks_per_host > e.K, "osgp": e.ranks_per_host < e.K}
    several["noloco"] = several["sgp"]
    if several.get(table["name"]):  # on a link: the plan has the mean of a period, and everything else on it
        assert seconds <= e.step.seconds * (1 + 1e-9)
    else:  # the last message of osgp has no next step to hide behind
        assert seconds == pytest.approx(e.step.seconds, rel=1e-9, abs=2 * e.step.behind / 64)


@pytest.mark.parametrize(
    ("table", "messages"),
    [
        ({"name": "sgp", "peers": 2}, 1),
        ({"name": "ssp", "max_staleness": 1}, 1),
        ({"name": "ad_psgd"}, 4 / 3),
        ({"name": "noloco", "sync_every": 4}, 2 / 3),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_a_link_is_kept_busy_as_long_as_the_operations_of_the_method_take(
    subject_of_ours: TrainingProfile, table: dict[str, Any], messages: float
) -> None:
    """Of three groups, two send a question and get an answer (ad_psgd), or a pair sends messages (noloco)."""
    e = estimated(subject_of_ours, table, 6, 3)
    told = tomllib.loads(scenario_of(e))["messages"]["link_seconds"]
    busy = told * messages * max(e.ranks_per_host // e.K, 1) / table.get("sync_every", 1)
    between = {k: s for k, s in e.step.phases.items() if k not in ("compute", "grad_reduce", "param_gather")}
    assert busy == pytest.approx(e.step.behind or sum(between.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            {"name": "adacomm", "initial_sync_every": 4, "adapt_every": 8},
            "adacomm .*: this method cannot be simulated: after which",
        ),
        (
            {"name": "switch", "first": {"name": "bsp"}, "then": {"name": "sgp"}, "at": 5},
            "switch at=5: a scenario has the seconds of one method: plan each of the two by itself",
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_what_nobody_knows_beforehand_is_refused(
    subject_of_ours: TrainingProfile, table: dict[str, Any], line: str
) -> None:
    e = estimated(subject_of_ours, table, 16, 4)
    with pytest.raises(UserError, match=f"^--scenario: {line}"):
        scenario_of(e)
