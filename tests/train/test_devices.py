"""Tests of which device a rank trains on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpcsgd.comm import streams, threads
from hpcsgd.comm.backend_choice import place_on_node
from hpcsgd.comm.streams import HOST, StreamEvent, device_for
from hpcsgd.errors import UserError
from hpcsgd.launcher import LAUNCHERS, Launcher
from hpcsgd.train import devices
from hpcsgd.train.devices import Delivery


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in LAUNCHERS:
        for name in launcher.variables:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Set up a machine with three devices, and return the list of those that were made current."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize("wanted", ["auto", "xpu"])
def test_a_rank_has_the_device_of_its_number(wanted: str, three: list[int]) -> None:
    assert [device_for(wanted, i) for i in range(5)] == [torch.device("xpu", i) for i in (0, 1, 2, 0, 1)]
    assert three == [0, 1, 2, 0, 1]


def test_the_host_is_left_its_training(three: list[int]) -> None:
    assert device_for("cpu", 1) == HOST
    assert three == []


def test_without_a_device_there_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert device_for("auto", 3) == device_for("cpu", 3) == HOST
    with pytest.raises(UserError, match=r"device = 'cuda': torch sees none here .* this machine: auto, cpu$"):
        device_for("cuda", 0)


OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
"""The message of torch."""


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_driver_that_is_too_old_is_reported(
    wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch sees no GPU then. A run that needs one must not train on the host instead."""

    def begin() -> None:
        raise RuntimeError(OLD)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "init", begin)
    monkeypatch.setattr(streams, "DRIVERS", (tmp_path,))
    with pytest.raises(
        UserError, match=f"^device = '{wanted}': .*The NVIDIA driver on your system is too old"
    ) as told:
        device_for(wanted, 0)
    assert "\n" not in str(told.value)
    assert device_for("cpu", 0) == HOST
    monkeypatch.setattr(streams, "DRIVERS", (tmp_path / "no driver",))
    assert device_for("auto", 0) == HOST


def test_gpus_that_are_hidden_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def begin() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "init", begin)
    monkeypatch.setattr(streams, "DRIVERS", (tmp_path,))
    assert device_for("auto", 0) == HOST


def test_another_kind_is_refused(three: list[int]) -> None:
    with pytest.raises(UserError, match=r"device = 'cuda': .* this machine: auto, cpu, xpu$"):
        device_for("cuda", 0)


@pytest.mark.usefixtures("unlaunched")
def test_numbers_are_counted_node_by_node() -> None:
    assert threads.run(5, place_on_node, nodes=[0, 7, 0, 7, 7]) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    "launcher", [each for each in LAUNCHERS if each.local_rank], ids=lambda each: each.name
)
@pytest.mark.usefixtures("unlaunched")
def test_a_launcher_that_says_the_number_is_believed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in launcher.variables:
        monkeypatch.setenv(name, "8")
    monkeypatch.setenv(str(launcher.local_rank), "3")
    assert threads.run(1, place_on_node) == [3]


@pytest.mark.usefixtures("unlaunched")
def test_where_it_does_not_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    assert threads.run(2, place_on_node, nodes=[0, 0]) == [0, 1]


@pytest.mark.usefixtures("unlaunched")
def test_the_launcher_is_believed_before_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm counts one helper of the launcher on each node."""
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    for name, value in (slurm | {"PMI_SIZE": "8", "PMI_RANK": "6", "MPI_LOCALRANKID": "2"}).items():
        monkeypatch.setenv(name, value)
    assert threads.run(1, place_on_node) == [2]


def test_samples_for_the_host_stay_what_they_are() -> None:
    x = torch.zeros(3)
    assert Delivery(HOST)(x) is x


@pytest.mark.usefixtures("far_device")
def test_samples_travel_while_the_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: list[devices.StreamEvent] = []

    def noted(device: torch.device) -> devices.StreamEvent:
        arrivals.append(StreamEvent(device))
        return arrivals[-1]

    monkeypatch.setattr(devices, "StreamEvent", noted)
    device, x = torch.device("far", 0), torch.arange(6.0)
    computed = torch.zeros(6, device=device)
    torch.ops.far.hold(0, 0, True)  # the device is still at the step before
    there = Delivery(device)(x)
    computed += there
    wait_for(arrivals[0].passed)
    torch.ops.far.hold(0, 0, False)
    assert torch.equal(computed.cpu(), x)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
