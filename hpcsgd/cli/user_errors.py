"""How a command that runs in one process tells the user what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hpcsgd.errors import UserError


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """End the process with the error's one line on stderr and exit code 1, without a traceback."""
    try:
        yield
    except UserError as error:
        print(f"hpcsgd: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("hpcsgd: interrupted", file=sys.stderr)
        sys.exit(130)
