"""Jobs of several processes that fail: all ranks end soon, with one message and the right exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from comm.jobs import KILLED, LIMIT, launch
from hpcsgd import errors
from hpcsgd.comm import Communicator, PeerLost, last_words, readers, shutdown, threads
from hpcsgd.errors import PEER_LOST, JobError, UserError

SERVICE = "service = RequestServer(world, lambda source, question: [(source, question)], 8)\n"
GROUP = """
from hpcsgd.comm.process_group import GroupBackend
group = world.with_backend(GroupBackend(world.backend.host, "gloo", world.timeout), "gloo")

def work_in_group():
    while True:
        group.allreduce(torch.ones(1000)).wait()

group.allreduce(torch.ones(1000)).wait()
"""
LONG = {
    "the same exception on all ranks",
    "an exception that came over the lane",
    "a UserError on one rank",
    "a fault on one rank, told together",
    "sys.exit with a message on one rank",
    "exit_all, but one rank does not come",
    "a rank stopped",
    "an exception with work in flight",
    "nobody asks any more, but one rank does not come",
    "sys.exit(3)",
    "exit_all",
    "a UserError",
    "a rank held up in a finally",
    "a JobError, and an excepthook of the script's own",
    "exit(3) on one rank",
    "an exception after stdout was closed",
    "an exception that has no words",
}
"""Cases that only `make test-long` runs, because every process takes seconds to start."""
BOTH, ALL = (0, 1), (0, 1, 2, 3)


class Case(NamedTuple):
    """A script, and how it has to end."""

    body: str
    message: str = ""
    """The text that has to be printed exactly once."""
    code: int | None = None
    """The launcher's exit code; None means any code except 0."""
    timeout: float = 60
    traceback: int = 0
    """The number of tracebacks printed."""
    lines: tuple[int, ...] = ()
    """The ranks whose earlier output must be complete."""
    said: tuple[str, ...] = ()
    """Other texts that have to be printed."""
    exact: bool = False
    """True if no rank is killed. Otherwise the launcher may report the code of a rank that it killed."""
    n: int = 2


CASES = {
    "an exception on one rank": Case(
        "fault()\nif rank == 2:\n    raise KeyError('which key')\nwork_until_lost()",
        "hpcsgd: rank 2: KeyError", 1, traceback=1, lines=(2,), n=4,
    ),
    "the same exception on all ranks": Case(
        "fault()\nraise FloatingPointError('the loss is nan')",
        "FloatingPointError: the loss is nan", 1, traceback=1,
    ),
    "an exception that came over the lane": Case(
        "fault()\nif rank == 1:\n    world.run(lambda: {}['lane'], 'x').wait()\nwork_until_lost()",
        "hpcsgd: rank 1: KeyError", 1, traceback=1,
    ),
    "a UserError on one rank": Case(
        "fault()\nif rank == 1:\n    raise UserError('no such file: x')\nwork_until_lost()",
        "hpcsgd: rank 1: no such file: x", 1,
    ),
    "too little memory on one rank": Case(
        "fault()\nif rank == 1:\n    raise torch.OutOfMemoryError('CUDA out of memory. Tried to "
        "allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.06 GiB is free. Process 7 has "
        "more.')\n"
        "work_until_lost()",
        "hpcsgd: rank 1: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 "
        "GiB of which 1.06 GiB is free; less is needed with a smaller batch", 1,
    ),
    "a JobError on all ranks": Case(
        "fault()\nraise JobError(f'groups = 3 does not divide 4')",
        "hpcsgd: groups = 3 does not divide 4", 1, lines=ALL, exact=True, n=4,
    ),
    "a UserError on one rank, told together": Case(
        "fault()\nwith raise_on_all_ranks(world, 'reading the data'):\n"
        "    if rank == 1:\n        raise UserError('no such file: x')\nwork_until_lost()",
        "hpcsgd: rank 1 of 2, reading the data: no such file: x", 1, lines=BOTH, exact=True,
    ),
    "a fault on one rank, told together": Case(
        "fault()\nwith raise_on_all_ranks(world, 'reading the data'):\n"
        "    if rank == 1:\n        raise KeyError('x')\nwork_until_lost()",
        "rank 1 of 2, reading the data: KeyError: 'x'", 1, traceback=1, lines=BOTH, exact=True,
    ),
    "sys.exit(3) on one rank": Case(
        "fault()\nif rank == 1:\n    sys.exit(3)\nwork_until_lost()", "", 3, lines=(1,)
    ),
    "sys.exit with a message on one rank": Case(
        "fault()\nif rank == 1:\n    sys.exit('enough of this')\nwork_until_lost()", "enough of this", 1
    ),
    "leaving together": Case("fault()\nexit_all(75)", "", 75, lines=ALL, exact=True, n=4),
    "exit_all, but one rank does not come": Case(
        "fault()\nif rank == 2:\n    time.sleep(600)\nexit_all(75)", "", 75, lines=(0, 1, 3), n=4
    ),
    "a rank killed": Case(
        "fault()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nwork_until_lost()", n=4
    ),
    "a rank frozen": Case(
        "fault()\nif rank == 0:\n    time.sleep(600)\nwork_until_lost()",
        "no answer within 2 s", 69, timeout=2,
    ),
    "a rank stopped": Case(
        "fault()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\nwork_until_lost()",
        "no answer within 2 s", 69, timeout=2,
    ),
    "leaving with work in flight": Case(
        "fault()\nif rank == 0:\n    world.recv(torch.zeros(1), 1)",
        "hpcsgd: rank 0 leaves with communication in flight", 1,
    ),
    "an exception with work in flight": Case(
        "fault()\nwork = world.allreduce(torch.ones(10))\nif rank == 0:\n    raise KeyError('x')\n"
        "work.wait()\nwork_until_lost()",
        "hpcsgd: rank 0: KeyError", 1, traceback=1,
    ),
    "an exception while the others answer": Case(
        f"{SERVICE}world.barrier()\nfault()\n"
        "if rank == 2:\n    raise KeyError('x')",
        "hpcsgd: rank 2: KeyError", 1, traceback=1, n=4,
    ),
    "a server that fails": Case(
        "service = RequestServer(world, lambda source, question: {}[source], 8)\nworld.barrier()\nfault()\n"
        "x = torch.ones(8, dtype=torch.uint8)\n"
        "if rank == 0:\n    service.ask({1: x}, {1: x.clone()}).wait()",
        "hpcsgd: rank 1: KeyError", 1, traceback=1,
    ),
    "nobody asks any more, but one rank does not come": Case(
        f"{SERVICE}world.barrier()\nfault()\n"
        "if rank == 1:\n    time.sleep(600)",
        "no answer within 2 s", 69, timeout=2,
    ),
    "a rank stopped in a process group": Case(
        f"{GROUP}fault()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\nwork_in_group()",
        "no answer within 2 s", 69, timeout=2, n=3,
    ),
    "a device that waits for a rank for ever": Case(
        "from hpcsgd.comm import process_group, watch\nfault()\n"
        "def ended(what):\n    process_group._end(world.backend, 2, what)\n"
        "watch.Watch(2, ended).add('allreduce over 3 ranks', lambda: False)\ntime.sleep(600)",
        "allreduce over 3 ranks: not done on the device within 2 s", 69, timeout=2, n=3,
    ),
    "an exception, and then one of ours in a finally": Case(
        "fault()\ntry:\n    if rank == 1:\n        raise KeyError('which key')\n"
        "finally:\n    raise UserError('ranks make different calls')",
        "hpcsgd: rank 1: KeyError", 1, traceback=1, said=("hpcsgd: rank 1: ranks make different calls",),
    ),
    "a rank held up in a finally": Case(
        "control = world.dup_with_thread()\nfault()\n"
        "try:\n    if rank == 1:\n        raise KeyError('which key')\n"
        "    control.allreduce(torch.ones(10)).wait()\nfinally:\n    world.gather_objects(1)",
        "while handling KeyError: 'which key'", 1,
    ),
    "an excepthook of the script's own": Case(
        "sys.excepthook = lambda kind, error, trace: None\n"
        "fault()\nif rank == 1:\n    raise KeyError('which key')\nwork_until_lost()",
        "hpcsgd: rank 1: KeyError: 'which key'", 1,
    ),
    "a JobError, and an excepthook of the script's own": Case(
        "sys.excepthook = lambda kind, error, trace: None\nfault()\nraise JobError('no such file: x')",
        "hpcsgd: no such file: x", 1, lines=BOTH, exact=True,
    ),
    "exit(3) on one rank": Case("fault()\nif rank == 1:\n    exit(3)\nwork_until_lost()", "", 3, lines=(1,)),
    "sys.exit of what the system takes for success": Case(
        "fault()\nif rank == 1:\n    sys.exit(256)\nwork_until_lost()", "", 1, lines=(1,)
    ),
    "a SystemExit that did not come from sys.exit": Case(
        "fault()\nif rank == 1:\n    raise SystemExit(3)\nwork_until_lost()",
        "rank 1 has left after SystemExit in line", 1,
    ),
    "an exception after stdout was closed": Case(
        "fault()\nif rank == 1:\n    sys.stdout.close()\n    raise KeyError('which key')\nwork_until_lost()",
        "hpcsgd: rank 1: KeyError", 1, traceback=1,
    ),
    "an exception that has no words": Case(
        "class Silent(Exception):\n    def __str__(self):\n        raise KeyError\n"
        "fault()\nif rank == 1:\n    raise Silent\nwork_until_lost()",
        "hpcsgd: rank 1: Silent", 1, traceback=1,
    ),
}  # fmt: skip


def some(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in cases]


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CASES))
def test_all_ranks_end(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    job = launch(tmp_path, case.body, timeout=case.timeout, n=case.n)
    everything = job.stdout + job.stderr
    if case.exact:
        assert job.code == case.code, everything
    else:
        assert job.code in ({case.code} | KILLED if case.code else set(range(1, 256))), everything
    assert "MPI_Abort(comm=" not in everything  # only an abort of the whole job is reported to Hydra
    assert job.seconds < LIMIT + (case.timeout if case.timeout < 60 else 0)
    if case.message:
        assert everything.count(case.message) == 1, everything
    else:
        assert "hpcsgd:" not in everything, everything
    assert everything.count("Traceback") == case.traceback, everything
    assert all(words in everything for words in case.said), everything
    for rank in case.lines:
        assert job.stdout.count(f"line of rank {rank}") == 1, everything


@pytest.mark.slow
def test_a_rank_killed_in_a_process_group(tmp_path: Path) -> None:
    """The message is printed once, or not at all if the launcher ends the ranks first."""
    job = launch(
        tmp_path,
        f"{GROUP}fault()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nwork_in_group()",
        n=3,
    )
    assert job.code in {69} | KILLED, job
    assert job.seconds < LIMIT
    assert (job.stdout + job.stderr).count("hpcsgd:") <= 1, job
    assert "Traceback" not in job.stderr, job


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    job = launch(tmp_path, "fault()\nwork_until_lost()", interrupt=True, n=2)
    assert job.code != 0
    assert job.seconds < LIMIT
    assert job.stderr.count("interrupted") == 1, job.stderr
    assert "Traceback" not in job.stderr, job.stderr


ALONE = {
    "sys.exit(3)": Case("fault()\nsys.exit(3)", "", 3),
    "exit_all": Case("fault()\nexit_all(75)", "", 75),
    "an exception": Case("fault()\nraise KeyError('which key')", "hpcsgd: KeyError", 1, traceback=1),
    "a UserError": Case("fault()\nraise UserError('no such file: x')", "hpcsgd: no such file: x", 1),
    "Ctrl-C": Case(  # a pytest in the background passes on that SIGINT is ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "fault()\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
        "hpcsgd: interrupted",
    ),
    "an end in good order": Case("fault()\nworld.allreduce(torch.ones(2)).wait()", "", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(ALONE))
def test_a_rank_alone_ends_like_any_python(name: str, tmp_path: Path) -> None:
    case = ALONE[name]
    job = launch(tmp_path, case.body, n=1)
    assert job.code == case.code or (case.code is None and job.code != 0), job
    assert job.stdout == "line of rank 0\n"
    assert job.stderr.count("hpcsgd:") == job.stderr.count(case.message or "hpcsgd:") == bool(case.message)
    assert job.stderr.count("Traceback") == case.traceback


@pytest.mark.slow
def test_leaving_in_good_order_is_no_error(tmp_path: Path) -> None:
    job = launch(tmp_path, "fault()\nx = torch.ones(2)\nworld.allreduce(x).wait()\nassert x[0] == 2", n=2)
    assert (job.code, job.stderr) == (0, "")


@pytest.mark.slow
def test_nobody_leaves_while_others_may_ask(tmp_path: Path) -> None:
    """Rank 1 sends a request long after the others have finished, and later than the shutdown may last."""
    job = launch(
        tmp_path,
        f"{SERVICE}world.barrier()\nfault()\n"
        "if rank == 1:\n"
        "    time.sleep(6)\n"
        "    room = {i: torch.zeros(8, dtype=torch.uint8) for i in range(2)}\n"
        "    service.ask({i: torch.ones(8, dtype=torch.uint8) for i in range(2)}, room).wait()\n"
        "    assert all(x.all() for x in room.values())\n"
        "    print('answered')",
        n=2,
    )
    assert (job.code, job.stderr) == (0, "")
    assert "answered" in job.stdout


def test_rank_0_alone_tells_what_all_raise(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left: list[tuple[int, int]] = []

    def raised(world: Communicator) -> None:
        here = shutdown.Shutdown(world)
        monkeypatch.setattr(here, "part", lambda code: left.append((world.rank, code)))
        error = JobError(f"seen by rank {world.rank}")
        here._uncaught(JobError, error, None)

    threads.run(2, raised)
    assert capfd.readouterr().err == "hpcsgd: seen by rank 0\n"
    assert sorted(left) == [(0, 1), (1, 1)]


@pytest.mark.slow
def test_an_exit_that_did_not_come_about_is_none(tmp_path: Path) -> None:
    """The script catches one exit, and the other one ends only a thread."""
    job = launch(
        tmp_path,
        "import threading\nfault()\ntry:\n    sys.exit(3)\nexcept SystemExit:\n    pass\n"
        "thread = threading.Thread(target=sys.exit, args=(4,))\nthread.start()\nthread.join()",
        n=2,
    )
    assert (job.code, job.stderr) == (0, "")


@pytest.mark.slow
def test_a_forked_process_ends_alone(tmp_path: Path) -> None:
    """It ends neither the job nor MPI, and its exit code is that of any Python process."""
    ends = ["sys.exit(3)", "sys.exit('enough')", "pass", "raise KeyError", "raise SystemExit(0)"]
    cases = "".join(f"    if n == {n}:\n        {end}\n" for n, end in enumerate(ends))
    job = launch(
        tmp_path,
        "fault()\n"
        f"for n in range({len(ends)}):\n"
        "    sys.stdout.flush()\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        break\n"
        "    print(n, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        f"if not child:\n{cases}"
        "else:\n"
        "    world.allreduce(torch.ones(1)).wait()",
        n=2,
    )
    assert job.code == 0, job
    ended = [line for line in job.stdout.splitlines() if line[0].isdigit()]
    assert sorted(ended) == sorted(["0 3", "1 1", "2 0", "3 1", "4 1"] * 2), job
    assert job.stderr.count("KeyError") == 2 * 2, "a traceback quotes the line"
    assert job.stderr.count("a forked process has ended by SystemExit in line") == 2, job


def ours(error: Exception) -> None:
    """Raise `error` as a call of hpcsgd would, from a frame that does not belong to the script."""
    exec("raise error", {"__name__": "hpcsgd.made", "error": error})


def test_what_the_script_was_handling_is_found() -> None:
    cause = KeyError("which key")

    def behind(error: Exception, of: BaseException = cause) -> BaseException | None:
        try:
            try:
                raise of
            finally:
                ours(error)
        except type(error) as raised:
            return last_words.under_way(raised)

    assert behind(UserError("x")) is cause
    assert behind(PeerLost("x")) is cause
    assert behind(JobError("x"), UserError("the other half")) is None
    assert behind(OSError("Python tells both")) is None


def test_what_our_calls_were_handling_is_not_reported() -> None:
    inside = "try:\n    {}['inside']\nexcept KeyError as error:\n    raise UserError('x') from error"
    with pytest.raises(UserError) as raised:
        exec(inside, {"__name__": "hpcsgd.made", "UserError": UserError})
    assert isinstance(raised.value.__context__, KeyError)
    assert last_words.under_way(raised.value) is None


LOST: list[BaseException] = [
    PeerLost("gone"),
    dist.DistNetworkError("the client socket has failed"),
    dist.DistStoreError("wait timeout"),
    dist.DistBackendError("NCCL error: ncclRemoteError"),
    RuntimeError("[/torch/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
]
OWN: list[BaseException] = [
    KeyError("x"),
    RuntimeError("Connection closed by peer"),
    RuntimeError("[/torch/gloo/transport/tcp/pair.cc:534] op.preamble.length <= op.nbytes"),
    dist.DistBackendError("NCCL error: invalid usage"),
]


def test_whether_another_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [last_words.exit_code(error) for error in LOST] == [PEER_LOST] * len(LOST)
    assert [last_words.exit_code(error) for error in OWN] == [1] * len(OWN)
    assert last_words.exit_code(KeyboardInterrupt()) == 130
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert [last_words.is_loss(error) for error in LOST] == [True, False, False, False, False], (
        "torch has no say"
    )


def test_the_first_failure_is_the_one_that_a_batch_script_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCSGD_FAILURE", str(tmp_path / "failure"))
    errors.tell("hpcsgd: the cause")
    errors.tell("hpcsgd: what followed from it")
    assert (tmp_path / "failure").read_text() == "hpcsgd: the cause\n"
    assert capfd.readouterr().err == "hpcsgd: the cause\n"
    monkeypatch.setenv("HPCSGD_FAILURE", str(tmp_path / "no" / "folder"))
    errors.tell("hpcsgd: the cause")
    assert capfd.readouterr().err.splitlines()[1:] == ["hpcsgd: the cause"]


def test_what_a_launcher_has_not_read_yet(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    assert not readers.unread(writing)
    os.write(writing, b"a line")
    assert readers.unread(writing)
    os.read(reading, 100)
    assert not readers.unread(writing)
    os.close(reading)
    os.close(writing)
    assert not readers.unread(writing)
    with open(tmp_path / "log", "w+") as file:
        file.write("a line")
        file.seek(0)
        assert not readers.unread(file.fileno())
