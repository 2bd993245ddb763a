"""``hpcsgd report``: runs as a page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import told_in_one_line


def report(
    runs: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    to: Path | None = None,
    live: Annotated[bool, Parameter(negative="")] = False,
    every: int = 10,
) -> None:
    """Write what runs left as one page of HTML, which needs neither server nor network; without MPI.

    :param runs: Run folders, or folders with runs in them, as that of a comparison.
    :param to: The file to write; else report.html, in the folder where one is named.
    :param live: Write it again while jobs run, until all are complete; the page reloads itself.
    :param every: With --live, how many seconds from one time to the next.
    """
    with told_in_one_line():
        from hpcsgd.report import page

        if live:
            print(f"following {', '.join(map(str, runs))}; Ctrl-C ends it", flush=True)
            print(page.follow(runs, to, every))
        else:
            print(page.write(runs, to))
