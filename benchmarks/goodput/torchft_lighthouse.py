"""Run torchft's lighthouse: print its address, and serve until it is killed.

A replica without a heartbeat for a second counts as lost. A quorum waits a second for the replicas that are
alive.
"""

from __future__ import annotations

import threading

from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

SERVER = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000, quorum_tick_ms=100
)
print(SERVER.address(), flush=True)
threading.Event().wait()
