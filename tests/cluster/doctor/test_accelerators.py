"""Tests of the doctor's reports about accelerators, with host memory and gloo in place of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcsgd.cluster.doctor import Level, accelerators
from hpcsgd.cluster.doctor.accelerators import driver, links, look_at_accelerators
from hpcsgd.cluster.doctor.finding import Finding
from hpcsgd.comm import Communicator, threads
from hpcsgd.comm.backend_choice import Device
from hpcsgd.comm.shutdown import close_libraries
from hpcsgd.core.topology import form
from hpcsgd.start import form_as_launched

NVIDIA = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
    "GCC version:  gcc version 12.3.0\n"
)


def there(world: Communicator) -> Device:
    return Device(torch.device("cpu"), f"GPU {world.rank}")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here is one")
def test_without_any_it_is_one_line() -> None:
    def look(world: Communicator) -> list[Finding]:
        return look_at_accelerators(form_as_launched(world, 2, None).topology)

    (found,) = {tuple(each) for each in threads.run(2, look)}
    assert found == (Finding(Level.OK, f"GPUs: none that torch {torch.__version__} can use"),)


def test_a_driver_without_a_gpu_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accelerators, "DRIVERS", (tmp_path,))
    monkeypatch.setattr(accelerators, "why_none", lambda kind: "The driver is too old")
    found = accelerators._without([False])
    told = f"GPUs: none that torch {torch.__version__} can use: The driver is too old"
    assert found == Finding(Level.WARNING, told)


def test_some_ranks_without_one_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "local_device", lambda world: there(world) if world.rank else Device())
    (found,) = threads.run(2, lambda world: look_at_accelerators(form(world)))[1]
    assert found == Finding(Level.WARNING, "GPUs: 1 of 2 ranks have none that torch can use")


def test_every_way_is_measured_or_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "local_device", there)
    monkeypatch.setattr(accelerators, "SIZE", 1 << 16)
    (found,) = {
        tuple(map(str, each)) for each in threads.run(2, lambda world: look_at_accelerators(form(world)))
    }
    close_libraries()
    told = [text.removeprefix("OK       ") for text in found]
    assert [text.split(":")[0] for text in told] == [
        "driver",
        "links",
        "copies",
        "from device to device by mpi",
        f"from device to device by gloo of torch {torch.__version__}",
        "transport",
        "transport",
    ]
    assert "GB/s down, " in told[2]
    assert "alltoall of 0.1 MB over 2 ranks" in told[4]
    assert told[5] == "transport: not by gpu_mpi: threads takes no addresses"
    assert told[6] == "transport: mpi in groups, mpi across them"


def test_drivers_that_differ(tmp_path: Path) -> None:
    (tmp_path / "0").write_text(NVIDIA)
    (tmp_path / "1").write_text("6.10.5\n")

    def ask(world: Communicator) -> tuple[Finding, Finding]:
        missing = tmp_path / "none"
        same = driver(world, [missing, tmp_path / "0"])
        return same, driver(world, [tmp_path / str(world.rank)])

    for same, differing in threads.run(2, ask):
        assert same == Finding(Level.OK, "driver: 550.54.14")
        assert differing == Finding(Level.WARNING, "driver: 550.54.14 and 6.10.5: the nodes differ")
    assert threads.run(1, driver, []) == [Finding(Level.OK, "driver: unknown")]


@pytest.mark.parametrize(
    ("number", "direct", "level", "text"),
    [
        (1, {}, Level.OK, "a rank sees one GPU alone"),
        (3, {(0, 1), (0, 2), (1, 2)}, Level.OK, "the 3 GPUs of a node reach each other directly"),
        (3, {(0, 1)}, Level.WARNING, "by way of the host between GPUs 0-2, 1-2 of a node"),
        (2, None, Level.OK, "torch does not tell"),
    ],
)
def test_links(
    number: int, direct: set[tuple[int, int]] | None, level: Level, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reaches(a: torch.device, b: torch.device) -> bool | None:
        return None if direct is None else (a.index, b.index) in direct

    monkeypatch.setattr(accelerators, "all_visible", lambda: [torch.device("cuda", i) for i in range(number)])
    monkeypatch.setattr(accelerators, "reaches", reaches)
    for found in threads.run(2, links):
        assert found.level is level
        assert text in found.text


@pytest.mark.usefixtures("far_device")
def test_on_a_device_copies_and_staging_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "SIZE", 1 << 16)
    (found,) = {
        tuple(map(str, each)) for each in threads.run(2, lambda world: look_at_accelerators(form(world)))
    }
    told = [text.removeprefix("OK       ") for text in found]
    assert told[1] == "links: torch does not tell what is between devices of kind far"
    assert "GB/s up" in told[2]
    assert told[3].startswith("from device to device by mpi: alltoall of 0.1 MB over 2 ranks")
    assert told[4] == "transport: not by nccl: none for devices of kind far"
