"""torchft's lighthouse: prints its address, and serves until it is killed.

Who has not been heard of for a second is missed; one that is there is waited for as long.
"""

from __future__ import annotations

import threading

from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

SERVER = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000, quorum_tick_ms=100
)
print(SERVER.address(), flush=True)
threading.Event().wait()
