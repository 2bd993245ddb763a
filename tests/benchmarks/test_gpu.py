"""`benchmarks/gpu.py` without a GPU, and those of its parts that work on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import programs
from gpu import staging
from harness import WallClock
from hpcsgd.comm.streams import accelerator
from pythons import python
from step_overhead.devices import device_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.skipif(accelerator() is not None, reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = python(str(SCRIPT), "--quick", "--json", str(file))
    done = programs.run(command)
    assert done.stdout.startswith("no GPU here: nothing was measured")
    found = json.loads(file.read_text())
    assert (found["rows"], found["goals"], found["machine"]["gpu"]) == ([], [], None)


def test_an_operation_is_held_against_its_copies() -> None:
    seen: list[int] = []
    rows = staging.rows_of(CPU, (400, 16_000_000), 3, lambda x: seen.append(x.numel()), lambda: None)
    assert [(row["bytes"], row["who"]) for row in rows] == [
        (size, who) for size in (400, 16_000_000) for who in (staging.DOWN, staging.UP, staging.STAGED)
    ]
    assert set(seen) == {100, 4_000_000}
    (goal,) = staging.goals(rows)
    assert goal.name == "16 MB: staged allreduce of one rank over the bus"
    assert 0 <= goal.value < 1, "nothing was copied"
    assert [len(staging.cells(row)) for row in rows] == [len(staging.HEAD)] * len(rows)


def test_copies_go_where_they_are_said_to_go() -> None:
    x = torch.ones(4)
    calls = staging.calls(x, lambda _: None)
    calls[staging.DOWN]()
    x.zero_()
    calls[staging.UP]()
    assert x.tolist() == [1.0] * 4


def test_the_clock_waits_for_what_is_under_way() -> None:
    waited: list[str] = []
    clock = WallClock(lambda: waited.append("done"))
    clock.start()
    assert clock.stop() >= 0
    assert len(waited) == 3


def test_ranks_share_the_devices_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert [device_of("cuda", rank).index for rank in range(4)] == chosen == [0, 1, 0, 1]
    assert device_of("cpu", 3) == CPU
