"""``hpcsgd cite``: the papers that a training is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import told_in_one_line


def cite(job: Path, /, *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Print BibTeX of what a job file uses: method, parts, model, optimizer, and hpcsgd.

    :param job: The job file, or a run folder.
    :param overrides: Keys of the file to change, as in --method.name sgp.
    """
    with told_in_one_line(job, overrides):
        from hpcsgd.citing import cite as bibtex

        print(bibtex(job, overrides))
