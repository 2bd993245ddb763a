"""Interrupted and resumed, a run ends with the same bits as one that was left alone."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training.jobs import MPIEXEC, Runs

from hpcsgd.data import Store, convert

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec")]

STEPS_PER_EPOCH = 12
LAST = 36


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With the run `whole`, which nobody interrupted."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("runs")
    convert("digits", None, folder / "digits.h5")
    runs = Runs(folder, folder / "digits.h5")
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


def test_the_same_job_gives_the_same_bits(runs: Runs) -> None:
    runs.train("again")
    assert_as_if_never_interrupted(runs, "again")


@pytest.mark.parametrize(("every", "resumes_at"), [("5", 15), (None, 12), ("12", 12)])
def test_killed_in_mid_epoch(runs: Runs, every: str | None, resumes_at: int) -> None:
    run = f"killed-{every}"
    options = [] if every is None else ["--training.checkpoint_every", every]
    runs.interrupted(run, *options, after=17, by=kill_rank_2)
    assert not (runs.folder / run / "model.pt").exists()
    runs.train(
        run, *options, "--resume", expect=f"resuming at step {resumes_at} from a checkpoint of 2 × 2 ranks\n"
    )
    assert_as_if_never_interrupted(runs, run)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("file", ["rank-00001.h5", "manifest.json"])
def test_a_truncated_newest_checkpoint(runs: Runs, file: str) -> None:
    run, options = f"truncated-{file}", ("--training.checkpoint_every", "5")
    runs.interrupted(run, *options, after=17, by=kill_rank_2)
    assert [path.name for path in runs.checkpoints(run)] == ["step-00000010", "step-00000015"]
    truncate(runs.checkpoints(run)[-1] / file)
    output = runs.train(run, *options, "--resume", expect="resuming at step 10 from")
    assert output.count("checkpoint step-00000015 is damaged") == 1
    assert_as_if_never_interrupted(runs, run)


def stop_one(ranks: list[int]) -> None:
    os.kill(ranks[3], signal.SIGUSR1)


def stop_all(ranks: list[int]) -> None:
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)


@pytest.mark.parametrize(("name", "stop"), [("SIGUSR1", stop_one), ("SIGTERM", stop_all)])
def test_stopped_by_a_signal(runs: Runs, name: str, stop: Callable[[list[int]], None]) -> None:
    output = runs.interrupted(name, after=5, by=stop, code=75)
    assert f"{name} received: saved step" in output
    (saved,) = runs.checkpoints(name)
    runs.train(name, "--resume", expect=f"resuming at step {int(saved.name[5:])} from")
    assert_as_if_never_interrupted(runs, name)


def test_stopped_by_the_time_limit(runs: Runs) -> None:
    limit = ("--training.time_limit", "1.5")
    output = runs.train("late", *limit, code=75, SECONDS_PER_STEP="0.1")
    assert "time limit reached: saved step" in output
    runs.train("late", "--resume")
    assert_as_if_never_interrupted(runs, "late")


def test_a_used_run_folder_is_left_alone(runs: Runs) -> None:
    def content() -> dict[str, tuple[bytes, int]]:
        files = [path for path in (runs.folder / "whole").rglob("*") if path.is_file()]
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = content()
    output = runs.train("whole", code=1, expect="whole: holds a run: pass --resume to go on with it")
    assert output.count("holds a run") == 1
    assert content() == before


def test_resuming_what_is_complete_changes_nothing(runs: Runs) -> None:
    shutil.copytree(runs.folder / "whole", runs.folder / "complete")
    runs.train("complete", "--resume", expect=f"resuming at step {LAST} from")
    assert_as_if_never_interrupted(runs, "complete")


def test_without_a_checkpoint_it_starts_at_the_beginning(runs: Runs) -> None:
    runs.interrupted("early", after=3, by=kill_rank_2)
    assert runs.checkpoints("early") == []
    runs.train("early", "--resume", expect="no checkpoint to resume from: starting at the beginning")
    assert_as_if_never_interrupted(runs, "early")


SHAPES = [(4, 1), (1, 4), (1, 1), (2, 1)]


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_goes_on_with_other_ranks(runs: Runs, elsewhere: str, P: int, K: int) -> None:
    """To the end, with every sample of the epoch that was under way seen exactly once."""
    run = f"{elsewhere}-{P}-{K}"
    shutil.copytree(runs.folder / elsewhere, runs.folder / run)
    for seen in runs.folder.glob("seen-*"):
        seen.unlink()
    options = (
        "--data.transform",
        "net:watched",
        "--training.epochs",
        "1",
        "--job.groups",
        str(P),
        "--resume",
    )
    lr = "" if P == 2 else "; the learning rate stays that of 2 groups"
    expected = f"from a checkpoint of 2 × 2 ranks, cut anew for {P} × {K}{lr}\n"
    runs.train(run, *options, n=P * K, expect=expected)
    data = Store(runs.folder / "digits.h5", "train")
    everything = Counter(row.numpy().tobytes().hex() for row in data.__getitems__(range(len(data))).x)
    before = Counter((runs.folder / run / "seen before").read_text().split())
    after = Counter("".join(path.read_text() for path in runs.folder.glob("seen-*")).split())
    assert before + after <= everything
    left_out = (everything - before).total() % (P * K)
    assert (before + after).total() == len(data) - left_out
    records = runs.records(run)
    assert sum(r["samples"] for r in records if r["kind"] == "step") == len(data) - left_out
    assert [r["epoch"] for r in records if r["kind"] == "evaluation"] == [1]


@pytest.fixture(scope="module")
def elsewhere(runs: Runs) -> str:
    """A run of 2 × 2 ranks that was stopped in its first epoch."""
    runs.interrupted(
        "elsewhere",
        "--data.transform",
        "net:watched",
        "--training.epochs",
        "1",
        after=4,
        by=stop_one,
        code=75,
    )
    seen = [path.read_text() for path in sorted(runs.folder.glob("seen-*"))]
    (runs.folder / "elsewhere" / "seen before").write_text("".join(seen))
    return "elsewhere"
