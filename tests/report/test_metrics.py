from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.errors import UserError
from hpcsgd.report.metrics import SPARSE, Metrics, noted, read


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
        metrics.meeting(step=step, distance=0.5)
        metrics.selection(step=step, delta=0.25, vote=1.0, met=1.0)
        metrics.sparse(step=step, **noted({"density": 0.01, "error": 2.5, "distance": 3.0}, *SPARSE))
        add_step(metrics, step)
        metrics.evaluation(step=step, epoch=step, loss=0.3, accuracy=0.9, distance=0.2, seconds=1.0)
        metrics.epoch(step=step, epoch=step, loss=0.4, seconds=2.0)


def test_records_read_back_as_written_and_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    add_all(metrics, range(1, 2))
    assert read(tmp_path / "metrics.jsonl") == [
        {"kind": "meeting", "step": 1, "distance": 0.5},
        {"kind": "selection", "step": 1, "delta": 0.25, "vote": 1.0, "met": 1.0},
        {"kind": "sparse", "step": 1, "density": 0.01, "error": 2.5},
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
            "ahead": {"0": 2, "4": 1},
        },
        {
            "kind": "evaluation",
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


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "meeting", "step": 1, "distance": 2.0}\n{"kind": "mee')
    assert read(path) == [{"kind": "meeting", "step": 1, "distance": 2.0}]


def test_damage_elsewhere_is_an_error_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "epoch", "step": 1}\n{"ki\n{"kind": "epoch", "step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a metrics record"):
        read(path)
