"""Waits of the host in a step: calls of the CUDA runtime that return when the GPU is done."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu.section import FAR, Setting
from harness.workloads import Step

WAITING = (
    "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy",
    "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize",
    "hipStreamSynchronize", "hipEventSynchronize", "hipDeviceSynchronize", "hipMemcpy",
)  # fmt: skip
STEP = "a step"
Event = dict[str, Any]


def waits_of(step: Step, steps: int, setting: Setting) -> Counter[str]:
    """Return how often the host waited for what, and where, in `steps` steps after one uncounted step."""
    if setting.kind == FAR:
        step()
        torch.accelerator.synchronize()
        torch.ops.far.forget_waits()
        for _ in range(steps):
            step()
        return Counter(torch.ops.far.waits(0))
    return named(traced(step, steps, setting))


def traced(step: Step, steps: int, setting: Setting) -> list[Event]:
    """Return the events of torch's profiler while these steps run."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    step()
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            with record_function(STEP):
                step()
        if setting.kind != "cpu":
            torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


def named(events: list[Event]) -> Counter[str]:
    """Return the waits within steps, each with the innermost torch operation around it on the same thread."""
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in whole if event["name"] == STEP and event.get("cat") == "user_annotation"]
    operations = [event for event in whole if event.get("cat") == "cpu_op"]
    found = Counter[str]()
    for event in whole:
        if event["name"] not in WAITING or not any(_within(event, step) for step in steps):
            continue
        around = [each for each in operations if each["tid"] == event["tid"] and _within(event, each)]
        inner = min(around, key=lambda each: each["dur"], default={"name": "no operation of torch"})
        found[f"{event['name']} in {inner['name']}"] += 1
    return found


def _within(event: Event, outer: Event) -> bool:
    return outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"]
