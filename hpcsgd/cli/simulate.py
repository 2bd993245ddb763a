"""``hpcsgd simulate``: how fast a job would be, and what its ranks would wait for."""

from __future__ import annotations

import json as as_json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from hpcsgd.cli.user_errors import errors_in_one_line
from hpcsgd.cli.words import ScenarioKeys
from hpcsgd.errors import UserError, in_file
from hpcsgd.files.pictures import require_format


def simulate(
    scenario: Path,
    /,
    *overrides: ScenarioKeys,
    picture: Path | None = None,
    json: Path | None = None,
) -> None:
    """Simulate a job event by event: its speed, what ranks wait for, what failures cost.

    :param scenario: The TOML file; an example is examples/simulation.toml.
    :param overrides: Keys of the file to change, such as --method.sync_every 4 --job.groups 64.
    :param picture: A PNG to draw: the seconds of a step over time, groups ahead, checkpoint intervals.
    :param json: A file to write all figures to.
    """
    with errors_in_one_line(scenario, overrides):
        if picture is not None:
            require_format("--picture", picture)
        from hpcsgd.performance.simulation import report
        from hpcsgd.performance.simulation import simulate as simulated_of
        from hpcsgd.performance.simulation.scenario import load

        simulation = load(scenario, overrides)
        with in_file(scenario):
            simulated = simulated_of(simulation)
        print("\n".join(report.lines(simulated)))
        if json is not None:
            with _writing(json):
                json.write_text(as_json.dumps(report.record(simulated), indent=1) + "\n", encoding="utf-8")
        if picture is not None:
            from hpcsgd.performance.simulation.picture import draw

            with _writing(picture):
                draw(simulated, picture)


@contextmanager
def _writing(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
