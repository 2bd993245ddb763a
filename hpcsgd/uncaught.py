"""Errors of a script before it calls `init`: they end the job with one line, as later errors do."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hpcsgd.errors import UserError, in_one_line, tell
from hpcsgd.launcher import launched


def watch() -> None:
    """Print an uncaught `UserError` as one line from now on; other errors are printed as before."""
    before = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            before(kind, error, trace)
            return
        by = launched(os.environ)
        if by is None or by.size == 1:
            tell(f"hpcsgd: {in_one_line(error)}")
            return
        from hpcsgd.comm import joining, place

        try:
            if not isinstance(error, place.NoWorld):
                joining.world()  # joins the other ranks, so that from here on all end together
        except place.NoWorld as without:
            tell(f"hpcsgd: {in_one_line(without)}")
            return
        if sys.excepthook is uncaught:  # no world was joined
            tell(f"hpcsgd: {in_one_line(error)}")
        else:
            sys.excepthook(kind, error, trace)

    sys.excepthook = uncaught
