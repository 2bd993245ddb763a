"""How a command that runs in one process tells the user what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hpcsgd.config.at_line import at_line
from hpcsgd.errors import JobError, UserError, in_one_line


@contextmanager
def told_in_one_line(job: Path | None = None, overrides: Sequence[str] = ()) -> Iterator[None]:
    """End the process with the error's one line on stderr and exit code 1, without a traceback. Where it is
    about a key of the file `job`, with its line there."""
    try:
        with at_line(job, overrides) if job is not None else nullcontext():
            yield
    except UserError as error:
        told = error if isinstance(error, JobError) else in_one_line(error)  # of a fault there is a traceback
        print(f"hpcsgd: {told}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("hpcsgd: interrupted", file=sys.stderr)
        sys.exit(130)
