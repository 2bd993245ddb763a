"""Tests of jobs without MPI: how they begin and end, with torchrun and without a launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import programs
from comm.jobs import LIMIT, Job, by_torchrun, by_variables
from hpcsgd.errors import EXIT_CODE_FILE, PEER_LOST, STOPPED
from pythons import python
from train.launches import unlaunched

pytestmark = pytest.mark.slow
LONG = pytest.mark.long
TABLE = re.compile(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+).*?traceback : (.*?)\n", re.DOTALL)
"""Matches in torchrun's output: the rank that failed, its exit code, and the first line of its message."""


class Case(NamedTuple):
    """A script, and how it has to end."""

    body: str
    cause: tuple[int, int]
    """The rank that failed, and its exit code."""
    message: str = ""
    """The text that has to be printed once."""
    codes: tuple[int, ...] = ()
    """The exit codes of all ranks, if no launcher supervises them."""
    timeout: float = 60


LOST = (PEER_LOST,) * 4
CASES = {
    "an exception": Case(
        "if rank == 2:\n    fault()\n    raise KeyError('which key')\nwork_until_lost()",
        (2, 1), "hpcsgd: rank 2: KeyError", (1, 1, 1, 1),
    ),
    "a UserError of rank 0": Case(
        "if rank == 0:\n    fault()\n    raise UserError('no such file: x')\nwork_until_lost()",
        (0, 1), "hpcsgd: rank 0: no such file: x", (1, 1, 1, 1),
    ),
    "a rank killed": Case(
        "if rank == 2:\n    fault()\n    os.kill(os.getpid(), signal.SIGKILL)\nwork_until_lost()",
        (2, -9), r"Connection (closed|reset) by peer", (69, 69, -9, 69),
    ),
    "rank 0 killed": Case(
        "if rank == 0:\n    fault()\n    os.kill(os.getpid(), signal.SIGKILL)\nwork_until_lost()",
        (0, -9), "hpcsgd: rank 1: ", (-9, 69, 69, 69),
    ),
    "sys.exit(3)": Case(
        "if rank == 1:\n    fault()\n    sys.exit(3)\nwork_until_lost()", (1, 3), "", (3, 3, 3, 3)
    ),
    "a rank that hangs": Case(
        "if rank == 1:\n    fault()\n    time.sleep(600)\nwork_until_lost()",
        (0, PEER_LOST), "no answer within 4 s; not reported to be in it: rank 1", LOST, timeout=4,
    ),
    "a rank that has left the others in a collective": Case(
        "if rank == 1:\n    fault()\nelse:\n    work_until_lost()",
        (0, 1), "rank 1 has left", (1, 1, 1, 1),
    ),
    "all leave with an exit code": Case(
        "fault()\nexit_all(75)", (0, STOPPED), "", (STOPPED,) * 4
    ),
}  # fmt: skip


def check_print(job: Job, case: Case) -> None:
    assert job.seconds < LIMIT + (case.timeout if case.timeout < LIMIT else 0), job
    ours = [line for line in job.stderr.splitlines() if line.startswith("hpcsgd: ")]
    assert len(ours) == bool(case.message), job
    assert re.search(case.message, "".join(ours)), job
    assert "c10d" not in job.stderr.replace("[c10d] The hostname of the client socket", ""), job


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG if "hangs" in name else []) for name in CASES]
)
def test_all_ranks_end_where_nobody_looks_after_them(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    job = by_variables(tmp_path, case.body, timeout=case.timeout)
    check_print(job, case)
    assert job.codes == case.codes, job


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG if "hangs" in name else []) for name in CASES]
)
def test_torchrun_ends_all_ranks_and_names_the_one_that_failed(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    job = by_torchrun(tmp_path, case.body, timeout=case.timeout, environ=exit_code_file(tmp_path))
    assert job.code == 1, job
    table = TABLE.search(job.stderr)
    assert table is not None, job
    rank, code, said = table.groups()
    if name != "all leave with an exit code":  # either rank may have been noticed first
        assert int(rank) == case.cause[0], job
    assert int(code) == case.cause[1], job
    if code == "-9":  # the agent noticed this before the ranks could report it
        case = case._replace(message="")
    else:
        assert exit_code_in(tmp_path) == int(code), job
    check_print(job, case)
    if case.message and int(code) != PEER_LOST:
        assert re.search(case.message, said), job


@LONG
def test_a_killed_rank_is_a_loss_for_the_batch_script(tmp_path: Path) -> None:
    """The agent looks at its ranks only after the others have ended."""
    patient = ["--monitor-interval", "15"]
    job = by_torchrun(
        tmp_path, CASES["a rank killed"].body, options=patient, environ=exit_code_file(tmp_path)
    )
    assert job.code == 1, job
    assert exit_code_in(tmp_path) == PEER_LOST, job


def test_a_rank_may_end_long_after_the_others_know_that_it_has_left(tmp_path: Path) -> None:
    """Rank 0 has closed its connections by then, which is no loss."""
    body = (
        "from hpcsgd.comm import shutdown\n"
        "def closed_late(close=shutdown.close_libraries):\n    time.sleep(1)\n    close()\n"
        "if rank == 1:\n    shutdown.close_libraries = closed_late\nfault()"
    )
    job = by_variables(tmp_path, body)
    assert job.codes == (0,) * 4, job
    assert "hpcsgd: " not in job.stderr, job


def test_a_rank_that_is_ended_before_it_reports_has_written_its_exit_code(tmp_path: Path) -> None:
    body = (
        "import threading\n"
        "def end_when_it_waits():\n"
        "    while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:\n        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "if rank == 1:\n    fault()\n    threading.Thread(target=end_when_it_waits).start()\n"
        "    raise KeyError('not reported')\nwork_until_lost()"
    )
    job = by_variables(tmp_path, body, n=2, environ=exit_code_file(tmp_path))
    assert job.codes == (PEER_LOST, 1), job
    assert "not reported" not in job.stderr
    assert exit_code_in(tmp_path) == 1


def exit_code_file(folder: Path) -> dict[str, str]:
    """Return the environment that names the file for the exit code of a job in `folder`."""
    return {EXIT_CODE_FILE: str(folder / "exit-code")}


def exit_code_in(folder: Path) -> int | None:
    """Return the exit code that a job has written, or None if there is no file."""
    path = folder / "exit-code"
    return int(path.read_text()) if path.exists() else None


def torchrun(n: int, *words: str | Path, options: Sequence[str] = (), **environ: str) -> programs.Done:
    """Run torchrun, which starts `n` ranks of a Python program."""
    start = ["--standalone", "--nproc-per-node", str(n), *options, "--no-python", *python(*map(str, words))]
    agent = python("-m", "torch.distributed.run", *start)
    return programs.run(agent, env={**unlaunched(), **environ}, check=False)


def of_ours(done: programs.Done) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("hpcsgd: ")]


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(
        f"import logging, os, sys\nlogging.basicConfig(level=logging.INFO)\nimport hpcsgd\n{body}\n"
    )
    return path


MISTAKES = {
    "groups that do not divide": ("hpcsgd.init(groups=2)", {}, "groups = 2 does not divide the 3 ranks"),
    "an unknown backend": ("hpcsgd.init(backend='glo')", {}, "backend = 'glo': did you mean 'gloo'?"),
    "MPI, of which there is no world": (
        "hpcsgd.init(backend='mpi')", {}, "torchrun (WORLD_SIZE) started 3 ranks but MPI sees a world of 1: "
    ),
    "two launchers": (
        "hpcsgd.init()", {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"},
        "torchrun (WORLD_SIZE) and mpiexec of MPICH or Intel MPI (PMI_SIZE) have both started ranks, 3 and 2",
    ),
    "a mistake before init": ("hpcsgd.hierarchical(sync_every=0)\nhpcsgd.init()", {}, "sync_every = 0: "),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_ends_all_ranks(name: str, tmp_path: Path) -> None:
    body, environ, message = MISTAKES[name]
    done = torchrun(3, script(tmp_path, f"{body}\nprint('trains')"), **environ)
    assert done.returncode == 1
    assert "trains" not in done.stdout
    (line,) = of_ours(done)
    assert message in line
    assert done.stderr.count("exitcode  : 0") == 0


def test_how_ranks_were_joined_is_the_first_line(tmp_path: Path) -> None:
    done = torchrun(2, script(tmp_path, "hpcsgd.init(groups=2)"), **exit_code_file(tmp_path))
    assert done.returncode == 0, done
    assert exit_code_in(tmp_path) is None
    told = [line for line in done.stderr.splitlines() if line.startswith("INFO:hpcsgd")]
    assert told == ["INFO:hpcsgd.start:2 ranks by gloo: torchrun started them"]


def test_of_a_good_end_torch_prints_nothing(tmp_path: Path) -> None:
    body = "import torch\nworld = hpcsgd.init(groups=2).world\nworld.allreduce(torch.ones(100_000)).wait()"
    done = torchrun(4, script(tmp_path, body))
    assert done.returncode == 0, done
    assert "c10d" not in done.stderr.replace("[c10d] The hostname of the client socket", ""), done


def test_several_worlds_and_a_default_group_of_the_script(tmp_path: Path) -> None:
    body = (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "for P in (1, 3):\n"
        "    topology, x = hpcsgd.init(groups=P), torch.ones(1)\n    topology.world.allreduce(x).wait()\n"
        "    assert (topology.num_groups, topology.rank, x.item()) == (P, dist.get_rank(), 3), x\n"
        "dist.all_reduce(x)\ntopology.mesh()\nassert x.item() == 9, x\ndist.destroy_process_group()"
    )
    done = torchrun(3, script(tmp_path, body))
    assert done.returncode == 0, done


def test_restarted_ranks_find_their_own_world(tmp_path: Path) -> None:
    body = (
        "import torch\ntopology, x = hpcsgd.init(), torch.ones(1)\ntopology.world.allreduce(x).wait()\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if attempt == '0' and topology.rank == 1:\n    raise KeyError('once')\n"
        "topology.world.barrier()\n"
        "if topology.rank == 0:\n    print('attempt', attempt, 'of', int(x))"
    )
    again = ["--max-restarts", "1"]
    done = torchrun(3, script(tmp_path, body), options=again, **exit_code_file(tmp_path))
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == ["attempt 1 of 3"]
    assert exit_code_in(tmp_path) is None


def test_a_step_of_slurm_without_mpi(tmp_path: Path) -> None:
    """The variables are those that `srun python` sets on one node."""
    body = (
        "import torch\ntopology, x = hpcsgd.init(), torch.ones(1)\ntopology.world.allreduce(x).wait()\n"
        "print(topology.rank, int(x))"
    )
    path = script(tmp_path, body)
    step = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost", "MPI4PY_LIBMPI": "/nowhere/libmpi.so",
    }  # fmt: skip
    ranks = [
        programs.start(python(str(path)), env={**unlaunched(), **step, "SLURM_PROCID": str(rank)})
        for rank in range(2)
    ]
    done = [programs.finish(rank) for rank in ranks]
    assert [each.returncode for each in done] == [0, 0], done
    assert [each.stdout for each in done] == ["0 2\n", "1 2\n"]
    assert "2 ranks by gloo: srun started them, and there is no MPI (" in done[0].stderr


def test_a_job_file_names_the_backend(tmp_path: Path) -> None:
    made = programs.run(python("-m", "hpcsgd", "data", "convert", "digits", str(tmp_path / "digits.h5")))
    assert made.returncode == 0
    words = (
        "-m", "hpcsgd", "train", "examples/digits.toml", "--training.epochs", "1",
        "--data.path", tmp_path / "digits.h5", "--run.output_dir", tmp_path / "run",
    )  # fmt: skip
    done = torchrun(4, *words)
    assert done.returncode == 0, done
    assert done.stdout.startswith("4 ranks by gloo: torchrun started them\n")
    assert "test" in done.stdout
    forced = torchrun(4, *words, "--parallel.backend", "mpi")
    assert forced.returncode == 1
    (line,) = of_ours(forced)
    assert "torchrun (WORLD_SIZE) started 4 ranks but MPI sees a world of 1" in line
    unknown = torchrun(4, *words, "--parallel.backend", "glo")
    assert "did you mean 'gloo'? Allowed: auto, gloo, mpi" in "".join(of_ours(unknown))
