"""The test device works as intended: results that were not waited for are visibly wrong."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import programs
from far import DEVICES, building, device
from far.ranks import SLOW, slowed

TESTS = Path(__file__).parents[1]
FIRST, SECOND = "far:0", "far:1"

pytestmark = pytest.mark.usefixtures("far_device")


def slow_stream() -> torch.Stream:
    """Return a stream other than the default one, on which every task takes long."""
    stream = torch.Stream(FIRST)
    torch.ops.far.delay(0, stream.stream_id, SLOW)
    return stream


def test_torch_has_it_as_its_accelerator() -> None:
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("far")
    assert torch.accelerator.device_count() == DEVICES


def test_torch_does_not_see_it_outside_of_its_tests() -> None:
    """Other tests of this process find a machine without an accelerator."""
    with device.switched_off():
        assert torch.accelerator.current_accelerator(check_available=True) is None
        assert not torch.accelerator.is_available()


@pytest.mark.slow
def test_host_code_that_touches_its_memory_ends() -> None:
    touch = f"""
import ctypes, sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
import torch, far
far.prepare()
with far.switched_on():
    x = torch.ones(4, device={FIRST!r})
    torch.accelerator.synchronize()
    ctypes.string_at(x.data_ptr(), 4)
print("read")
"""
    done = programs.run([sys.executable, "-c", touch], check=False)
    assert done.returncode == -11
    assert done.stdout == ""


def test_work_is_done_later_and_in_order() -> None:
    with slowed(torch.device(FIRST), {0: SLOW}):
        x = torch.zeros(3, device=FIRST)
        for _ in range(5):
            x += 1
        assert not torch.accelerator.current_stream().query()
        assert x.tolist() == [5, 5, 5]


def test_another_stream_waits_for_nothing_but_events() -> None:
    stream, event = torch.Stream(FIRST), torch.Event(FIRST)
    x = torch.zeros(3, device=FIRST)
    torch.accelerator.synchronize()
    torch.ops.far.hold(0, stream.stream_id, True)
    with stream:
        x += 1
        event.record(stream)
    assert x.clone().tolist() == [0, 0, 0]
    torch.accelerator.current_stream().wait_event(event)
    late = x.clone()
    torch.ops.far.hold(0, stream.stream_id, False)
    assert late.tolist() == [1, 1, 1]


def test_fresh_memory_holds_nothing_that_looks_like_a_number() -> None:
    assert torch.empty(5, device=FIRST).isnan().all()
    assert torch.empty(5, device="cpu", pin_memory=True).isnan().all()


def test_freed_memory_is_given_away_on_its_stream_whatever_others_do() -> None:
    stream = slow_stream()
    x = torch.ones(1000, device=FIRST)
    torch.accelerator.synchronize()
    with stream:
        y = x * 2
    del x
    torch.accelerator.synchronize()
    assert y.isnan().all()


def test_recorded_on_a_stream_memory_is_kept_for_it() -> None:
    stream = slow_stream()
    x = torch.ones(1000, device=FIRST)
    torch.accelerator.synchronize()
    with stream:
        y = x * 2
    x.record_stream(stream)
    del x
    torch.accelerator.synchronize()
    assert y.eq(2).all()


def test_pinned_memory_is_kept_while_it_is_copied() -> None:
    stream = slow_stream()
    here = torch.ones(1000, pin_memory=True)
    place = here.data_ptr()
    with stream:
        x = here.to(FIRST, non_blocking=True)
    del here
    assert torch.empty(1000, pin_memory=True).data_ptr() != place
    torch.accelerator.synchronize()
    assert x.eq(1).all()
    assert torch.empty(1000, pin_memory=True).data_ptr() == place


def test_copies_that_nobody_waits_for_bring_nothing_yet() -> None:
    with slow_stream():
        x = torch.ones(10, device=FIRST)
        here = torch.empty(10, pin_memory=True).copy_(x, non_blocking=True)
        assert here.isnan().all()
        torch.accelerator.current_stream().synchronize()
    assert here.eq(1).all()


def test_host_waits_are_counted_with_their_reason() -> None:
    x = torch.ones(3, device=FIRST)
    event = torch.Event(FIRST)
    event.record(torch.accelerator.current_stream())
    torch.ops.far.forget_waits()
    event.synchronize()
    x.sum().item()
    x.cpu()
    x.nonzero()
    torch.accelerator.synchronize()
    assert torch.ops.far.waits(0) == ["event", "item", "copy", "aten::nonzero", "device"]
    assert torch.ops.far.waits(1) == []


def test_a_training_step_of_torch_waits_for_nothing() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).to(FIRST)
    optimizer = optim.AdamW(net.parameters())
    x, y = torch.randn(4, 5, device=FIRST), torch.zeros(4, dtype=torch.int64, device=FIRST)
    torch.ops.far.forget_waits()
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert torch.ops.far.waits(0) == []


def test_events_tell_the_time_that_work_was_said_to_take() -> None:
    torch.ops.far.costs(1_000.0, 50_000.0)
    first, last = (torch.Event(FIRST, enable_timing=True) for _ in range(2))
    x, here = torch.ones(3, device=FIRST), torch.ones(3, pin_memory=True)
    first.record(torch.accelerator.current_stream())
    x *= 2
    x += 1
    x.copy_(here, non_blocking=True)
    last.record(torch.accelerator.current_stream())
    last.synchronize()
    assert first.elapsed_time(last) == 52.0  # milliseconds


def test_streams_work_at_the_same_time() -> None:
    torch.ops.far.costs(1_000.0, 0.0)
    first, last, joined = (torch.Event(FIRST, enable_timing=True) for _ in range(3))
    x, y = torch.ones(3, device=FIRST), torch.ones(3, device=FIRST)
    first.record(torch.accelerator.current_stream())
    stream = torch.Stream(FIRST)
    stream.wait_event(first)
    with stream:
        y += 1
        y += 1
        joined.record(stream)
    x += 1
    torch.accelerator.current_stream().wait_event(joined)
    x += 1
    last.record(torch.accelerator.current_stream())
    last.synchronize()
    assert first.elapsed_time(last) == 3.0


def test_its_generators_draw_what_a_cpu_draws_and_go_on_from_a_state() -> None:
    torch.manual_seed(3)
    here = torch.randn(4, device="cpu")
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="far:1").cpu(), here)
    state = torch.get_device_module("far").get_rng_state("far:1")
    more = torch.randn(4, device="far:1").cpu()
    torch.get_device_module("far").set_rng_state(state, "far:1")
    assert torch.equal(torch.randn(4, device="far:1").cpu(), more)


def test_autocast_makes_products_narrow() -> None:
    x = torch.ones(2, 2, device=FIRST)
    with torch.autocast("far", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32


def test_a_failure_is_reported_though_late() -> None:
    x = torch.ones(2, device=FIRST)
    with pytest.raises(IndexError, match="out of bounds"):  # the next call raises it if the device is fast
        x[torch.tensor([7], device=FIRST)].add_(1)
        torch.accelerator.synchronize()


def test_tensors_on_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.add(torch.ones(2, device="far:0"), torch.ones(2, device="far:1"))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(3), nn.MaxPool2d(2)]
)
def test_layers_come_to_the_same_bits(layer: nn.Module) -> None:
    def results(where: str) -> list[torch.Tensor]:
        net = layer.to(where)
        net.zero_grad()
        x = torch.linspace(-1, 1, 2 * 3 * 36).view(2, 3, 6, 6).to(where).requires_grad_()
        y = net(x)
        y.square().sum().backward()
        gradients = [each.grad for each in (x, *net.parameters()) if each.grad is not None]
        return [part.detach().cpu() for part in (y, *gradients)]

    here, there = results("cpu"), results(FIRST)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.long
def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    building.build(tmp_path / "libfar.so", "-Werror")


@pytest.mark.long
def test_streams_and_events_have_no_races(tmp_path: Path) -> None:
    """The thread sanitizer checks the part of the device that does not use torch."""
    checked = building.program("sanitized.cpp", ["queue.cpp"], tmp_path, "-O1", "-fsanitize=thread")
    done = programs.run([checked], check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.long
def test_the_sanitizer_sees_an_event_that_is_not_waited_for(tmp_path: Path) -> None:
    whole = (building.NATIVE / "sanitized.cpp").read_text()
    broken = tmp_path / "broken.cpp"
    broken.write_text(whole.replace("consumer.await(ready);", ""))
    assert broken.read_text() != whole
    include = f"-I{building.NATIVE}"
    checked = building.program(str(broken), ["queue.cpp"], tmp_path, "-O1", "-fsanitize=thread", include)
    done = programs.run([checked], check=False)
    assert done.returncode != 0
    assert "data race" in done.stderr or "read twice" in done.stderr  # whichever comes first


def test_memory_freed_by_a_thread_of_another_device_does_not_move_the_clock() -> None:
    """Any thread may collect cyclic garbage."""
    torch.ops.far.costs(1_000.0, 0.0)
    first, last = (torch.Event(SECOND, enable_timing=True) for _ in range(2))
    freed, over = threading.Event(), threading.Event()
    kept = [torch.ones(3, device=SECOND)]

    def observe() -> None:  # this thread's clock depends only on this device
        first.record(torch.accelerator.current_stream(SECOND))
        over.set()
        freed.wait(10)
        last.record(torch.accelerator.current_stream(SECOND))
        last.synchronize()

    observer = threading.Thread(target=observe)
    observer.start()
    assert over.wait(10)
    x = torch.ones(3, device=FIRST)
    for _ in range(1_000):
        x += 1
    torch.accelerator.synchronize(FIRST)
    kept.clear()
    freed.set()
    observer.join()
    assert first.elapsed_time(last) == 0.0
