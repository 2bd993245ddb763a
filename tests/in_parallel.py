"""Calls in parallel threads, as ranks make them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

LIMIT = 600.0
"""The time limit of the calls in seconds."""


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls in parallel, and return their results.

    Raises the first exception of a call, or `TimeoutError` after `LIMIT`. Calls that have not returned by
    then do not hold up the test, or the end of its process.
    """
    futures = [_begun(call) for call in calls]
    for future in wait(futures, LIMIT, FIRST_EXCEPTION).done:
        future.result()
    return [future.result(0) for future in futures]


def _begun(call: Callable[[], Any]) -> Future[Any]:
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
