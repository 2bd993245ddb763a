"""Tests of the watch that notices a device which makes no progress."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hpcsgd.comm.streams import StreamEvent, settle
from hpcsgd.comm.watch import Watch


class Alarm:
    def __init__(self) -> None:
        self.lost: list[str] = []
        self.rung = threading.Event()

    def __call__(self, what: str) -> None:
        self.lost.append(what)
        self.rung.set()


def test_what_is_not_done_in_time_is_reported_once_by_name() -> None:
    alarm = Alarm()
    watch, start = Watch(0.3, alarm), time.monotonic()
    watch.add("first", lambda: True)
    watch.add("second", lambda: False)
    watch.add("third", lambda: False)
    assert alarm.rung.wait(20)
    assert time.monotonic() - start >= 0.3
    assert watch._thread is not None
    watch._thread.join(20)
    assert alarm.lost == ["second"]


@pytest.mark.slow
def test_the_time_of_an_operation_begins_when_those_before_it_are_done() -> None:
    """Each operation takes less than the limit, but all of them together take longer."""
    alarm, done, over = Alarm(), [threading.Event() for _ in range(4)], threading.Event()
    watch = Watch(2.0, alarm)
    for i, event in enumerate(done):
        watch.add(f"operation {i}", event.is_set)
    watch.add("the last", lambda: over.set() or True)
    for event in done:
        time.sleep(0.6)
        event.set()
    assert over.wait(20)
    assert alarm.lost == []
    watch.close()


def test_a_closed_watch_sees_nothing() -> None:
    alarm = Alarm()
    watch = Watch(0.2, alarm)
    watch.add("an operation", lambda: False)
    watch.close()
    assert watch._thread is not None
    watch._thread.join(20)
    assert not watch._thread.is_alive()
    assert alarm.lost == []


@pytest.mark.slow
@pytest.mark.usefixtures("far_device")
def test_a_device_that_stands_still_is_noticed() -> None:
    """Meanwhile the host continues: nothing in this test waits for the device."""
    device, alarm = torch.device("far", 0), Alarm()
    x = torch.zeros(4, device=device)
    settle(device)
    watch = Watch(0.3, alarm)
    torch.ops.far.delay(0, 0, 3_000_000)
    x.add_(1)
    moment = StreamEvent(device)
    watch.add("an operation", moment.passed)
    assert alarm.rung.wait(20)
    assert not moment.passed()
    torch.ops.far.delay(0, 0, 0)
    settle(device)
    assert moment.passed()
    assert x.cpu().tolist() == [1.0] * 4
