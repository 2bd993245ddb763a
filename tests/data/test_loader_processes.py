"""Signals that a batch system sends to all processes end no loader process; the end of the reader does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import Dataset

import programs
from hpcsgd.data import AsRank, Loader, Sampler, read_batches
from hpcsgd.errors import UserError
from train.launches import JOB, Ended, ended, make_store, start

READER = """\
import multiprocessing, os
from multiprocessing import forkserver, resource_tracker
from hpcsgd.data import AsRank, Batches, Sampler, ImageDataset
from hpcsgd.data.loader import reading

if __name__ == "__main__":
    data = ImageDataset("small.h5", "train")
    batches = iter(reading(data, Batches(Sampler(data, AsRank(0, 1)), 2), num_workers=2))
    next(batches)
    workers = [worker.pid for worker in multiprocessing.active_children()]
    behind = [forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid]
    for pid in workers + behind:
        os.system(f"kill -USR1 {pid}; kill -TERM {pid}")
    print(len(workers), 1 + len(list(batches)))
"""

SIGNALLED = """\
import os

calls = 0

def send(x, _):
    global calls
    calls += 1
    if calls == 5:
        os.system("kill -{signal} 0")  # from a process that is not the workers' owner
    return x
"""


@pytest.mark.slow
def test_signals_from_elsewhere_end_no_worker_and_the_reader_may_exit(tmp_path: Path) -> None:
    """The reader exits while its loader processes still run; Python then sends SIGTERM to them."""
    make_store(tmp_path / "small.h5", train=96)
    (tmp_path / "reader.py").write_text(READER)
    done = ended(start(tmp_path, [sys.executable, "reader.py"]))
    assert (done.code, done.out, done.err) == (0, "2 48\n", "")


class Killed(Dataset[int]):
    """A dataset that kills the process which reads it, as a full memory does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return i


@pytest.mark.slow
def test_a_loader_process_that_is_killed_is_one_line() -> None:
    """Torch looks after its loader processes every five seconds."""
    data = Killed()
    loader = Loader(data, 2, Sampler(data, AsRank(0, 1)), num_workers=1)
    with pytest.raises(
        UserError, match=r"^a loader process was killed \(DataLoader worker .*\), usually because"
    ):
        next(iter(loader))


def test_other_errors_of_a_loader_stay() -> None:
    def batches(message: str) -> Iterator[int]:
        yield 1
        raise RuntimeError(message)

    for message, kind in (
        ("boom", RuntimeError),
        ("DataLoader worker (pid(s) 3) exited unexpectedly", UserError),
    ):
        with pytest.raises(kind) as raised:
            list(read_batches(batches(message)))  # pyright: ignore[reportArgumentType]
        assert message in str(raised.value)


def in_a_group_of_its_own(folder: Path, *words: str) -> Ended:
    process = programs.start(
        [sys.executable, "-m", "hpcsgd", "train", "job.toml", *words],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    return ended(process)


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["USR1", "TERM"])
def test_a_warning_to_all_processes_of_a_rank(tmp_path: Path, sent: str) -> None:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "signalling.py").write_text(SIGNALLED.format(signal=sent))
    words = ("--data.num_workers", "1", "--training.epochs", "100000", "--data.transform", "signalling:send")
    done = in_a_group_of_its_own(tmp_path, *words)
    assert (done.code, done.err) == (75, "")
    assert f"SIG{sent} received: saved step" in done.out
