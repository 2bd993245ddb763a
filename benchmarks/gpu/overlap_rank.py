"""One rank of the section `overlap`: traces a few steps by torch's profiler and by our own trace at once.

Rank 0 writes what both recorded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch.profiler import record_function

import hpcsgd
from gpu.models import Subject, tokens
from gpu.section import Setting, device_switched_on
from gpu.waits import traced
from harness.timing import now
from hpcsgd.comm.events import MESSAGE, Events
from hpcsgd.comm.streams import device_for
from hpcsgd.models import gpt
from hpcsgd.report.overlap import overlap, union
from hpcsgd.report.trace import Window

GROUPS, EVERY, WARM_UP, STEPS = 2, 2, 4, 4
LARGE = {"width": 512, "layers": 8, "heads": 8}
"""29 million parameters, so that messages take long enough to be seen."""
MARK = "clocks are compared"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    setting = Setting(given.kind, quick=False, rehearse=given.rehearse, seconds=0, folder=given.out.parent)
    with device_switched_on(given.kind):
        topology = hpcsgd.init(groups=GROUPS, device_backend={"intra_group": "mpi", "inter_group": "mpi"})
        found = measured(topology, setting)
    if topology.rank == 0:
        given.out.write_text(json.dumps(found))


def measured(topology: hpcsgd.Topology, setting: Setting) -> dict[str, Any]:
    device = device_for(setting.kind, topology.rank)
    types, batch, length = setting.of((8192, 16, 1024), (8192, 8, 512), (50, 2, 16))
    sizes = setting.of(LARGE, LARGE, {})
    subject = Subject("", lambda: gpt(types, **sizes), lambda: tokens(types, batch, length), device)
    step = subject.ours(topology, hpcsgd.hierarchical(EVERY))
    for _ in range(WARM_UP):
        step()
    events, marked = Events(), []

    def noted() -> None:
        """Make a step; for each step both clocks record when it began."""
        with record_function(MARK):
            marked.append(now())
        step()

    topology.world.stats.events = events
    begin = now()
    seen = traced(noted, STEPS, setting)
    end = now()
    topology.world.stats.events = None
    window = Window(begin, end, STEPS, events.take())
    mark = next(event for event in seen if event.get("name") == MARK and event.get("ph") == "X")
    messages = [
        (mark["ts"] + 1e6 * (event.start - marked[-STEPS]), mark["ts"] + 1e6 * (event.end - marked[-STEPS]))
        for event in window.events
        if event.kind == MESSAGE and event.thread != events.owner
    ]
    return {
        "trace": overlap(window, events.owner),
        "messages": union(messages),
        "kernels": of_device(seen, ("kernel",)),
        "copies": of_device(seen, ("gpu_memcpy", "gpu_memset")),
        "steps": [
            [e["ts"], e["ts"] + e["dur"]]
            for e in seen
            if e.get("name") == "a step" and e.get("ph") == "X" and e.get("cat") == "user_annotation"
        ],
    }


def of_device(seen: list[dict[str, Any]], kinds: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    """Return intervals in microseconds, by stream."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in seen:
        if event.get("cat") in kinds and event.get("ph") == "X":
            name = event["name"] if event["cat"] != "kernel" else "kernels"
            stream = f"{name.partition('(')[0].strip()}, stream {event.get('args', {}).get('stream', '?')}"
            found.setdefault(stream, []).append((event["ts"], event["ts"] + event["dur"]))
    return {stream: union(some) for stream, some in found.items()}


if __name__ == "__main__":
    main()
