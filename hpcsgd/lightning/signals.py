"""SIGTERM during a training with Lightning: it ends this rank, and the launcher then ends the others."""

from __future__ import annotations

import signal
import threading
from typing import Any


def without_handler_of_lightning() -> None:
    """Restore the action for SIGTERM that the script had before Lightning added its handler.

    Lightning's handler broadcasts from rank 0. The signal may reach one rank alone, or each rank in another
    step, and ranks would then wait for each other forever.
    """
    handlers: Any = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
    if handlers is None or threading.current_thread() is not threading.main_thread():
        return
    of_script = handlers[1:]
    signal.signal(signal.SIGTERM, of_script[0] if of_script else signal.SIG_DFL)
