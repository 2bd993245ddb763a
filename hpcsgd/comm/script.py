"""How the script of this process ended, as far as Python still knows this when it exits.

A script may have replaced our `sys.excepthook`, or leave by its own `SystemExit`. The frame of its main
module keeps the instruction at which it ended. The traceback of the exception contains that frame.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType


class MainModule:
    """The main module of the running script."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        names = vars(sys.modules["__main__"])
        frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_globals is names and frame.f_code.co_name == "<module>":
                self._frame = frame
            frame = frame.f_back

    @property
    def is_complete(self) -> bool:
        """True if the script has run to its last line."""
        return self._last_instruction.startswith("RETURN_")

    @property
    def left_by(self) -> str:
        """What ended the script and in which line; empty if it ran to the end or printed an exception."""
        if not self._last_instruction or self.is_complete or self.uncaught() is not None:
            return ""
        assert self._frame is not None
        return f"SystemExit in line {self._frame.f_lineno} of {self._frame.f_code.co_filename}"

    def uncaught(self) -> BaseException | None:
        """Return the exception that ended the script, once `sys.excepthook` has got it.

        An exception that was caught does not count, although pytest and IPython also store caught ones in
        `sys.last_value`.
        """
        trace = getattr(sys, "last_traceback", None)
        while self._frame is not None and trace is not None:
            if trace.tb_frame is self._frame:
                return sys.last_value
            trace = trace.tb_next
        return None

    @property
    def _last_instruction(self) -> str:
        frame = self._frame
        return "" if frame is None else dis.opname[frame.f_code.co_code[frame.f_lasti]]
