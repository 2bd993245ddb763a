"""How the script that this process runs came to its end, as far as Python still knows when it exits.

A script may have taken our `sys.excepthook` away, or leave by a `SystemExit` of its own. The frame of its
main module remembers at which instruction it ended, and a traceback of what ended it contains that frame.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType


class MainModule:
    """The main module of the script that is running now."""

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
        """Whether it has run to its last line."""
        return self._last_instruction.startswith("RETURN_")

    @property
    def left_by(self) -> str:
        """By what and where it was left; empty if it is complete or an exception was printed."""
        if not self._last_instruction or self.is_complete or self.uncaught() is not None:
            return ""
        assert self._frame is not None
        return f"SystemExit in line {self._frame.f_lineno} of {self._frame.f_code.co_filename}"

    def uncaught(self) -> BaseException | None:
        """The exception that has ended it, once it was given to `sys.excepthook`.

        Not one that somebody has caught and noted as the last one, as pytest and IPython do.
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
