"""``hpcsgd report``: runs as a page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import errors_in_one_line


def report(
    runs: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    to: Path | None = None,
    live: Annotated[bool, Parameter(negative="")] = False,
    every: int = 10,
) -> None:
    """Write a report about runs as one HTML page, which needs neither server nor network; without MPI.

    :param runs: Run folders, or folders with runs in them, such as that of a comparison.
    :param to: The file to write; default: report.html, in the folder if only one is given.
    :param live: Write the page again while jobs run, until all are complete; the page reloads itself.
    :param every: With --live, the seconds between two versions.
    """
    with errors_in_one_line():
        from hpcsgd.report import page

        if live:
            print(f"following {', '.join(map(str, runs))}; Ctrl-C ends it", flush=True)
            print(page.follow(runs, to, every))
        else:
            print(page.write(runs, to))
