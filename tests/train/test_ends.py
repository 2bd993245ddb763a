"""Tests that a run with a failure ends on every rank, soon, with an error code and one message."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import programs
from train.launches import JOB, Ended, ended, hpcsgd, make_store, start

pytestmark = pytest.mark.slow

RANKS = 2
"""Most jobs have this many ranks and groups, because every rank takes five seconds to start."""
JOB_OF_TWO = JOB.replace("[data]", "[parallel]\ngroups = 2\n[data]").replace("epochs = 1", "epochs = 10000")

FAULTS = '''\
"""Models and a transform that go wrong on some ranks, in their third call: two steps have gone well."""
import os
import sys
import time
from pathlib import Path

from torch import nn

from hpcsgd.errors import UserError

RANK = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
CALL = 3
Path(f"pid-{RANK}").write_text(str(os.getpid()))


def now():
    Path(f"fault-{RANK}").write_text(str(time.time()))


def raising(scores):
    raise ValueError("boom")


def failing(scores):
    raise UserError("the data of this rank is gone")


def exiting(scores):
    sys.exit(3)


def leaving(scores):
    raise SystemExit(0)


def dying(scores):
    os._exit(5)


def dying_as_if_done(scores):
    os._exit(0)


def freezing(scores):
    time.sleep(1000)


def not_a_number(scores):
    return scores * float("nan")


class Net(nn.Module):
    def __init__(self, fault, ranks, outputs=10):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(36, outputs))
        self.fault = globals()[fault] if RANK in ranks else None
        self.calls = 0

    def forward(self, x):
        scores = self.inner(x)
        self.calls += self.training
        if self.fault is not None and self.calls == CALL:
            now()
            return self.fault(scores)
        return scores


def net(fault="raising", ranks=()):
    return Net(fault, ranks)


def net_without_weights(ranks):
    if RANK in ranks:
        now()
        raise UserError("no weights for this rank")
    return net()


def net_of_another_shape():
    now()
    return Net("raising", (), outputs=10 + RANK)


def broken_net(ranks):
    if RANK in ranks:
        now()
        raise ValueError("boom")
    return net()


seen = []


def transform(x, generator):
    seen.append(len(x))
    if RANK == 1 and len(seen) == CALL:
        now()
        raise ValueError("boom")
    return x
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB_OF_TWO)
    (tmp_path / "faults.py").write_text(FAULTS)
    return tmp_path


def launch(folder: Path, *options: str, n: int = RANKS) -> programs.Running:
    return start(folder, [programs.mpiexec(), "-n", str(n), *hpcsgd("train", "job.toml", *options)])


def train(folder: Path, model: str, arguments: str = "{}", *options: str, n: int = RANKS) -> Ended:
    words = ("--model.name", f"faults:{model}", "--model.arguments", arguments, *options)
    return ended(launch(folder, *words, n=n))


def assert_ended(folder: Path, done: Ended) -> None:
    """Check that the run ended with an error, after the fault, and that no process is left.

    Timeouts for other ranks are longer than that of `ended`.
    """
    assert done.code != 0
    assert_nobody_stays(folder, done)


def assert_nobody_stays(folder: Path, done: Ended) -> None:
    """Check that no process is left after the fault, and that there is no summary of a complete training."""
    assert [*folder.glob("fault-*")], done.err  # otherwise it ended before the fault
    deadline = time.time() + programs.TIMEOUT
    while left := processes_in(folder):
        assert time.time() < deadline, left
        time.sleep(0.1)
    assert not (folder / "runs/job/summary.json").exists()


def processes_in(folder: Path) -> list[str]:
    """Return the command lines of living processes that were started in `folder`, including data workers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.joinpath("cwd").readlink() == folder:
                found.append(process.joinpath("cmdline").read_text().replace("\0", " "))
        except OSError:  # it ended meanwhile, or another user owns it
            continue
    return found


def test_processes_are_found(folder: Path) -> None:
    """Otherwise the tests below could not see that a process is left."""
    with programs.start(["sleep", "60"], cwd=folder) as sleeper:
        deadline = time.time() + programs.TIMEOUT
        while processes_in(folder) != ["sleep 60 "]:  # at first it is still a copy of this process
            assert time.time() < deadline, processes_in(folder)
        sleeper.kill()
    assert processes_in(folder) == []


long = partial(pytest.param, marks=pytest.mark.long)

STEP = "the loss is nan at step 3: try a lower learning rate or a longer warm-up"
ONE = "{ fault = '%s', ranks = [1] }"
ALL = "{ fault = '%s', ranks = [0, 1] }"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (ONE % "failing", "hpcsgd: rank 1: the data of this rank is gone"),
        long(ALL % "failing", "hpcsgd: rank 0: the data of this rank is gone"),
        (ONE % "not_a_number", f"hpcsgd: rank 1: {STEP}"),
        long(ALL % "not_a_number", f"hpcsgd: rank 0: {STEP}"),
    ],
    ids=["error of one", "error of all", "nan on one", "nan on all"],
)
def test_what_is_expected_is_one_line(folder: Path, arguments: str, line: str) -> None:
    done = train(folder, "net", arguments)
    assert_ended(folder, done)
    assert done.messages == [line]
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "options", "line", "cause"),
    [
        (ONE % "raising", [], "hpcsgd: rank 1: ValueError", "ValueError: boom"),
        long(ALL % "raising", [], "hpcsgd: rank 0: ValueError", "ValueError: boom"),
        (ONE % "raising", ["--data.num_workers", "1"], "hpcsgd: rank 1: ValueError", "ValueError: boom"),
        long(
            "{}", ["--data.transform", "faults:transform"], "hpcsgd: rank 1: ValueError", "ValueError: boom"
        ),
        (ONE % "exiting", [], "hpcsgd: rank 1: RuntimeError", "SystemExit: 3"),
        long(ONE % "leaving", [], "hpcsgd: rank 1: RuntimeError", "SystemExit: 0"),
    ],
    ids=["exception on one", "on all", "with data workers", "in the transform", "sys.exit", "SystemExit(0)"],
)
def test_what_is_not_expected_is_one_traceback(
    folder: Path, arguments: str, options: list[str], line: str, cause: str
) -> None:
    done = train(folder, "net", arguments, *options)
    assert_ended(folder, done)
    assert done.messages == [line]
    assert done.err.splitlines().count(cause) == 1
    assert "faults.py" in done.err


def test_a_model_that_cannot_be_built_on_one_rank(folder: Path) -> None:
    done = train(folder, "net_without_weights", "{ ranks = [1] }")
    assert_ended(folder, done)
    where = "job.toml: [model.arguments]"
    assert done.err == f"hpcsgd: rank 1 of 2, preparing the run: {where}: no weights for this rank\n"


@pytest.mark.long
def test_a_broken_model_on_some_ranks(folder: Path) -> None:
    done = train(folder, "broken_net", "{ ranks = [1, 3] }", n=4)
    assert_ended(folder, done)
    assert done.messages == ["hpcsgd: rank 1 of 4, preparing the run: ValueError: boom"]
    assert done.err.count("Traceback") == 1
    assert "in broken_net" in done.err


def test_models_that_differ(folder: Path) -> None:
    done = train(folder, "net_of_another_shape")
    assert_ended(folder, done)
    of = "of shape ({}, 36) and torch.float32 on rank {}"
    assert done.err == (
        "hpcsgd: ranks 0 and 1 differ: parameter inner.1.weight is "
        f"{of.format(10, 0)} and {of.format(11, 1)}: give all ranks the same\n"
    )


def test_a_store_that_one_rank_does_not_find(folder: Path) -> None:
    """Rank 1 works in its own folder, which has the job file but not its dataset file."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "job.toml").write_text(JOB_OF_TWO)
    command = [programs.mpiexec()]
    for place in (folder, elsewhere):
        command += ["-n", "1", "-wdir", str(place), *hpcsgd("train", "job.toml"), ":"]
    done = ended(start(folder, command[:-1]))
    assert done.code == 1
    place = f"rank 1 of 2, preparing the run: job.toml: [data] path: {elsewhere}/small.h5"
    assert done.err == f"hpcsgd: {place}: no such file; `hpcsgd data convert` makes a dataset file\n"
    assert not (folder / "runs").exists()


def test_a_rank_that_freezes(folder: Path) -> None:
    done = train(folder, "net", ONE % "freezing", "--parallel.timeout_s", "5", n=4)
    assert_ended(folder, done)
    assert len(done.messages) == 1
    assert "no answer within 5 s" in done.messages[0]


def test_a_rank_that_leaves_without_a_word(folder: Path) -> None:
    assert_ended(folder, train(folder, "net", ONE % "dying", n=4))


def test_a_rank_that_leaves_as_if_all_were_done(folder: Path) -> None:
    """Hydra kills the other ranks.

    Its exit code is 0, from the rank that left, or 9. That depends on whether Hydra reaped the others before
    all output was closed, and no rank can change it.
    """
    done = train(folder, "net", ONE % "dying_as_if_done", n=4)
    assert_nobody_stays(folder, done)
    assert done.messages == []


def interrupt(folder: Path, process: programs.Running, by: Callable[[], None]) -> Ended:
    """Wait until training is under way, write the fault file, call `by`, and return the end of the run."""
    metrics = folder / "runs/job/metrics.jsonl"
    deadline = time.time() + programs.TIMEOUT
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.time() < deadline, "training does not begin"
        time.sleep(0.05)
    (folder / "fault-by-hand").write_text(str(time.time()))
    by()
    return ended(process)


def test_an_interrupt_from_the_keyboard(folder: Path) -> None:
    process = launch(folder, "--model.name", "faults:net", "--model.arguments", "{}")
    done = interrupt(folder, process, lambda: process.send_signal(signal.SIGINT))
    assert_ended(folder, done)
    assert done.messages in ([f"hpcsgd: rank {rank}: interrupted"] for rank in range(2))  # the first to stop
    assert "Traceback" not in done.err


@pytest.mark.parametrize("method", ["hierarchical", "async_diloco"])
def test_a_rank_that_is_killed(folder: Path, method: str) -> None:
    """The run also ends with a method whose groups do not wait for each other and so would notice late."""
    given = ("--method.name", method, "--method.sync_every", "2")
    process = launch(folder, "--model.name", "faults:net", "--model.arguments", "{}", *given, n=4)
    done = interrupt(folder, process, lambda: os.kill(int((folder / "pid-2").read_text()), signal.SIGKILL))
    assert_ended(folder, done)
    assert done.messages == []
    assert (done.out + done.err).count("BAD TERMINATION") == 1, "the launcher tells, since nobody else can"
