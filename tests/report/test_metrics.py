from __future__ import annotations

import re
from pathlib import Path

import pytest

from full_disks import full_after
from hpcsgd.errors import UserError
from hpcsgd.report.metrics import Metrics, read


def add_step(metrics: Metrics, step: int) -> None:
    metrics.step(
        step=step,
        epoch=1,
        loss=1 / step,
        lr=0.1,
        samples=64,
        samples_per_s=640.0,
        phase_seconds={"compute": 0.1},
        phase_bytes={"allgather": 8},
        link_bytes={3: 16.0} if step % 2 else {},
        counts={"ahead": {0: 2, 4: 1}} if step % 2 else {},
    )


def add_all(metrics: Metrics, steps: range) -> None:
    for step in steps:
        metrics.sync(step=step, distance=0.5)
        metrics.method(step, {"delta": 0.25, "synced": True})
        metrics.method(step, {})
        add_step(metrics, step)
        metrics.evaluation(step=step, epoch=step, loss=0.3, accuracy=0.9, distance=0.2, seconds=1.0)
        metrics.epoch(step=step, epoch=step, loss=0.4, seconds=2.0)


def test_records_read_back_as_written_and_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    add_all(metrics, range(1, 2))
    assert read(tmp_path / "metrics.jsonl") == [
        {"kind": "sync", "step": 1, "distance": 0.5},
        {"kind": "method", "step": 1, "delta": 0.25, "synced": 1.0},
        {
            "kind": "step",
            "step": 1,
            "epoch": 1,
            "loss": 1.0,
            "lr": 0.1,
            "samples": 64,
            "samples_per_s": 640.0,
            "phase_seconds": {"compute": 0.1},
            "phase_bytes": {"allgather": 8},
            "link_bytes": {"3": 16.0},
            "counts": {"ahead": {"0": 2, "4": 1}},
        },
        {
            "kind": "eval",
            "step": 1,
            "epoch": 1,
            "loss": 0.3,
            "accuracy": 0.9,
            "distance": 0.2,
            "seconds": 1.0,
        },
        {"kind": "epoch", "step": 1, "epoch": 1, "loss": 0.4, "seconds": 2.0},
    ]
    metrics.close()


@pytest.mark.parametrize("torn", [b"", b'{"kind": "step", "st', b'{"kind": "step", "step": 2}'])
@pytest.mark.parametrize("resumed_step", [0, 2, 4])
def test_a_resumed_file_reads_as_if_never_interrupted(tmp_path: Path, torn: bytes, resumed_step: int) -> None:
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    with Metrics(whole) as metrics:
        add_all(metrics, range(1, 7))
    with Metrics(killed) as metrics:
        add_all(metrics, range(1, 5))
    killed.write_bytes(killed.read_bytes() + torn)
    with Metrics(killed, resumed_step=resumed_step) as metrics:
        add_all(metrics, range(resumed_step + 1, 7))
    assert killed.read_bytes() == whole.read_bytes()


OLD = b"""\
{"kind": "sync", "step": 1, "distance": 2.0, "interval": 4}
{"kind": "selection", "step": 1, "delta": 0.25, "wants_sync": 0.0, "synced": 1.0}
{"kind": "sparse", "step": 1, "density": 0.01}
{"kind": "step", "step": 1, "epoch": 1, "loss": 2.0, "lr": 0.1, "samples": 8, "samples_per_s": 1.0, \
"phase_seconds": {"data": 1.0}, "phase_bytes": {}, "link_bytes": {"1": 8}, "ahead": {"2": 4}}
"""


def test_a_run_of_an_older_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(OLD + b'{"kind": "sparse", "step": 3, "density": 0.01}\n')
    with Metrics(path, resumed_step=2) as metrics:
        metrics.method(3, {"density": 0.02})
    assert path.read_bytes().startswith(OLD)
    of_step = {"epoch": 1, "loss": 2.0, "lr": 0.1, "samples": 8, "samples_per_s": 1.0, "phase_bytes": {}}
    of_step |= {"phase_seconds": {"data": 1.0}, "link_bytes": {"1": 8}}
    assert read(path) == [
        {"kind": "sync", "step": 1, "distance": 2.0, "interval": 4},
        {"kind": "method", "step": 1, "delta": 0.25, "wants_sync": 0.0, "synced": 1.0},
        {"kind": "method", "step": 1, "density": 0.01},
        {"kind": "step", "step": 1, **of_step, "counts": {"ahead": {"2": 4}}},
        {"kind": "method", "step": 3, "density": 0.02},
    ]


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "sync", "step": 1, "distance": 2.0}\n{"kind": "syn')
    assert read(path) == [{"kind": "sync", "step": 1, "distance": 2.0}]


def test_damage_elsewhere_is_an_error_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "epoch", "step": 1}\n{"ki\n{"kind": "epoch", "step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a metrics record"):
        read(path)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """The system writes as much of a line as there is space for."""
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        add_step(metrics, 1)
        metrics.require_written()
        whole = path.read_bytes()
        with full_after(len(whole) + 20):
            add_step(metrics, 2)
        add_step(metrics, 3)  # records after a gap would be of no use
        with pytest.raises(
            UserError, match=f"^{path}: cannot be written: No space left on device: make space"
        ):
            metrics.require_written()
    assert path.read_bytes() == whole


def test_a_run_goes_on_without_lines_that_are_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        add_all(metrics, range(1, 5))
    lines = path.read_bytes().splitlines(keepends=True)
    glued = [*lines[:2], lines[2][:9] + lines[3], b"\0\n", *lines[4:]]
    path.write_bytes(b"".join(glued) + lines[2][:9])
    with Metrics(path, resumed_step=3) as metrics:
        add_all(metrics, range(4, 5))
    assert path.read_bytes() == b"".join([*lines[:2], *lines[4:]])
    assert caplog.messages == [f"{path}:3: not a metrics record: removed 2 lines to go on"]
    with Metrics(path, resumed_step=4):
        pass
    assert len(caplog.messages) == 1


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"notes\nof mine\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:1: not a metrics record"):
        Metrics(path)
    assert path.read_bytes() == b"notes\nof mine\n"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ('"lr"', '"mr"', "no 'lr'"),
        ('"distance": 0.5', '"dirtance": 0.5', "no 'distance'"),
        ('"step": 1,', '"step": "1",', "step = '1'"),
        ('"step": 1,', '"step": -1,', "step = -1"),
        ('"loss": 1.0', '"loss": [1]', "loss = [1]"),
        ('"allgather": 8', '"allgather": "8"', "phase_bytes.allgather = '8'"),
        ('"4": 1', '"x": 1', "counts.ahead.x = 1"),
        ('"ahead": {', '"ahead": 2, "b": {', "counts.ahead = 2"),
        ('"3": 16.0', '"s": 16.0', "link_bytes.s = 16.0"),
        ('"delta": 0.25', '"delta": [[]]', "delta = [[]]"),
    ],
)
def test_a_record_that_nobody_writes_is_named(tmp_path: Path, before: str, after: str, told: str) -> None:
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        add_all(metrics, range(1, 2))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert before in text
    (tmp_path / "metrics.jsonl").write_text(text.replace(before, after))
    with pytest.raises(UserError, match=rf"metrics.jsonl:\d: not a metrics record: {re.escape(told)}$"):
        read(tmp_path / "metrics.jsonl")
