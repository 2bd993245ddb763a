"""How a script ends whose mistake comes before it has called `init`: as after it, with one line."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hpcsgd.errors import UserError, in_one_line, tell
from hpcsgd.launcher import launched


def watch() -> None:
    """From now on a `UserError` that nobody catches is one line; anything else ends as before."""
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
                joining.world()  # with the others, on their way to it: from here on all end together
        except place.NoWorld as without:
            tell(f"hpcsgd: {in_one_line(without)}")
            return
        if sys.excepthook is uncaught:  # there is no world
            tell(f"hpcsgd: {in_one_line(error)}")
        else:
            sys.excepthook(kind, error, trace)

    sys.excepthook = uncaught
