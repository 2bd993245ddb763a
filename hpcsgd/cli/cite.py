"""``hpcsgd cite``: the papers on which a training is based."""

from __future__ import annotations

from pathlib import Path

from hpcsgd.cli.user_errors import errors_in_one_line
from hpcsgd.cli.words import JobKeys


def cite(job: Path, /, *overrides: JobKeys) -> None:
    """Print BibTeX for what a job file uses: method, parts, model, optimizer, and hpcsgd.

    :param job: The job file, or a run folder.
    :param overrides: Keys of the file to change, such as --method.name sgp.
    """
    with errors_in_one_line(job, overrides):
        from hpcsgd.cli.citing import cite as bibtex

        print(bibtex(job, overrides))
