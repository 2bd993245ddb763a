"""The message about the exception that ends a rank, and its exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

from hpcsgd.comm.backend import PeerLost, first_line
from hpcsgd.comm.streams import OutOfMemory, too_little_memory
from hpcsgd.errors import PEER_LOST, UserError, in_one_line

LOST = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "ncclRemoteError")
"""Phrases by which torch's libraries report a lost rank; the script's own errors lack them."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a job that this error ends."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return PEER_LOST if is_loss(error) else 1


def is_loss(error: BaseException) -> bool:
    """Return True if another rank is gone or does not answer, in hpcsgd's communication or in torch's own."""
    dist = sys.modules.get("torch.distributed")
    if isinstance(error, PeerLost) or dist is None or not dist.is_available():
        return isinstance(error, PeerLost)
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = last_line(error)  # str() is a method of the script's exception, and may raise
    by_torch = isinstance(error, dist.DistBackendError) or "/gloo/transport/" in text
    return by_torch and any(words in text for words in LOST)


def words(error: BaseException) -> str:
    """Return the text to print about `error`.

    It is one line if the user can fix the error, or if the program did not cause it; otherwise a traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if is_loss(error):
        return first_line(error)
    if isinstance(error, OutOfMemory):
        return in_one_line(too_little_memory(error))
    return in_one_line(error) if isinstance(error, UserError) else with_traceback(error)


def with_traceback(error: BaseException) -> str:
    """Return the name of the exception's type, and then Python's full report."""
    return f"{type(error).__name__}\n{''.join(traceback.format_exception(error))}"


def last_line(error: BaseException) -> str:
    """Return what Python prints below the traceback: the type of the exception, and its text."""
    return "".join(traceback.format_exception_only(error)).strip()


def under_way(error: BaseException) -> BaseException | None:
    """Return the script's own exception that was being handled when hpcsgd raised `error`, or None.

    A collective call in a `finally:` hides the first exception behind that of the call.
    """
    if not isinstance(error, (UserError, PeerLost)):
        return None  # Python itself prints both exceptions
    outside = list(_frames_of_script(error.__traceback__))
    seen: set[int] = set()
    handled = error.__context__
    while handled is not None and id(handled) not in seen:
        seen.add(id(handled))
        trace = handled.__traceback__
        ours = isinstance(handled, (UserError, PeerLost))
        if not ours and trace is not None and trace.tb_frame in outside:
            return handled
        handled = handled.__context__
    return None


def _frames_of_script(trace: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames of the script that called hpcsgd."""
    package = __name__.partition(".")[0]
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] != package:
        yield trace.tb_frame
        trace = trace.tb_next
