"""Tests that real runs, interrupted and resumed, end with the same bits as an uninterrupted one.

test_interruptions.py tests every step, for everything that does not need processes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from hpcsgd.data import ImageDataset, convert
from jobs import Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAST = 36  # 12 steps an epoch
MID_EPOCH = ("--training.checkpoint_every_steps", "5")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return runs that include `whole`, which was not interrupted."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("runs")
    convert("digits", None, folder / "digits.h5")
    runs = Runs(folder)
    runs.train("whole")
    assert runs.step("whole") == LAST
    return runs


def assert_as_if_never_interrupted(runs: Runs, run: str) -> None:
    ours, theirs = runs.model(run), runs.model("whole")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert runs.records(run) == runs.records("whole")


def kill_rank_2(ranks: list[int]) -> None:
    os.kill(ranks[2], signal.SIGKILL)


@pytest.fixture(scope="module")
def killed(runs: Runs) -> str:
    """Kill a run in the middle of an epoch, after it has written checkpoints of steps 10 and 15."""

    def kill_once_saved(ranks: list[int]) -> None:
        deadline = time.monotonic() + 60
        while runs.checkpoints("killed") != ["step-00000010", "step-00000015"]:
            assert time.monotonic() < deadline, runs.checkpoints("killed")
            time.sleep(0.02)
        kill_rank_2(ranks)

    runs.interrupted("killed", *MID_EPOCH, after=17, by=kill_once_saved)
    assert not (runs.folder / "killed" / "model.pt").exists()
    return "killed"


def test_killed_in_mid_epoch(runs: Runs, killed: str) -> None:
    run = runs.copy(killed, "killed and resumed")
    runs.train(run, *MID_EPOCH, "--resume", expect="resuming at step 15 from a checkpoint of 2 × 2 ranks\n")
    assert_as_if_never_interrupted(runs, run)


@pytest.mark.long
def test_the_newest_checkpoint_is_truncated(runs: Runs, killed: str) -> None:
    run = runs.copy(killed, "truncated")
    file = runs.folder / run / "checkpoints" / "step-00000015" / "rank-00001.h5"
    file.write_bytes(file.read_bytes()[:-1])
    output = runs.train(run, *MID_EPOCH, "--resume", expect="resuming at step 10 from")
    assert output.count("checkpoint step-00000015 is damaged (rank-00001.h5 has ") == 1
    assert_as_if_never_interrupted(runs, run)


@pytest.mark.long
def test_killed_before_the_first_checkpoint(runs: Runs) -> None:
    """It starts again, so this also shows that the same job gives the same bits twice."""
    runs.interrupted("early", after=3, by=kill_rank_2)
    runs.train("early", "--resume", expect="no checkpoint to resume from: starting at the beginning")
    assert_as_if_never_interrupted(runs, "early")


def signal_one(ranks: list[int]) -> None:
    os.kill(ranks[3], signal.SIGUSR1)


def terminate_all(ranks: list[int]) -> None:
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)


@pytest.fixture(scope="module")
def stopped(runs: Runs) -> str:
    """Stop a run in its first epoch by a signal to one rank; `seen` has the samples that it used."""
    output = runs.interrupted("stopped", after=3, by=signal_one, code=75, pace=0.4)
    (saved,) = runs.checkpoints("stopped")
    step = int(saved.removeprefix("step-"))
    assert f"SIGUSR1 received: saved step {step}, go on with --resume" in output
    assert 3 <= step < 12
    (runs.folder / "stopped" / "seen").write_text("\n".join(runs.seen()))
    return "stopped"


@pytest.mark.long
def test_stopped_again_and_again(runs: Runs, stopped: str) -> None:
    run = runs.copy(stopped, "again and again")
    output = runs.interrupted(run, "--resume", after=16, by=terminate_all, code=75, pace=0.4)
    assert "SIGTERM received: saved step" in output
    limit = ("--training.time_limit_s", "0.5")
    output = runs.train(run, "--resume", *limit, code=75, SECONDS_PER_STEP="0.1")
    assert "time limit reached: saved step" in output
    assert runs.step(run) < LAST
    runs.train(run, "--resume", expect="resuming at step")
    assert_as_if_never_interrupted(runs, run)


@pytest.mark.parametrize(("P", "K"), [(1, 4), *(pytest.param(P, 1, marks=pytest.mark.long) for P in (4, 1))])
def test_goes_on_with_other_ranks(runs: Runs, stopped: str, P: int, K: int) -> None:
    """It trains to the end of the epoch. No sample comes twice, and at most a remainder is left out."""
    run = runs.copy(stopped, f"{P} × {K}")
    cut = f"cut anew for {P} × {K}; the learning rate stays that of 2 groups\n"
    options = ("--training.epochs", "1", "--parallel.groups", str(P), "--resume")
    runs.train(run, *options, n=P * K, expect=f"from a checkpoint of 2 × 2 ranks, {cut}")
    assert (runs.folder / run / "model.pt").exists()
    data = ImageDataset(runs.folder / "digits.h5", "train")
    everything = Counter(row.numpy().tobytes().hex() for row in data.__getitems__(range(len(data))).x)
    before = Counter((runs.folder / run / "seen").read_text().split())
    both = before + Counter(runs.seen())
    assert both <= everything
    left_out = (everything - before).total() % (P * K)
    assert both.total() == len(data) - left_out
    records = runs.records(run)
    assert sum(record["samples"] for record in records if record["kind"] == "step") == both.total()
    assert [record["epoch"] for record in records if record["kind"] == "eval"] == [1]


@pytest.mark.long
def test_a_used_run_folder_is_left_alone(runs: Runs) -> None:
    def content() -> dict[Path, tuple[bytes, int]]:
        files = [path for path in (runs.folder / "whole").rglob("*") if path.is_file()]
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = content()
    output = runs.train("whole", code=1)
    assert output.count("whole: holds a run: pass --resume to go on with it") == 1
    assert content() == before


@pytest.mark.long
def test_resuming_what_is_complete_changes_nothing(runs: Runs) -> None:
    run = runs.copy("whole", "complete")
    runs.train(run, "--resume", expect=f"resuming at step {LAST} from")
    assert_as_if_never_interrupted(runs, run)
