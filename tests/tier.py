"""Run a tier of the tests, one part after the other, and check that they leave nothing behind.

    python tests/tier.py TARGET MPIEXEC

TARGET is a target of the Makefile: test, test-all, test-long or test-openmpi. The tests get a separate
temporary folder, which is deleted when they have passed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import programs

ROOT = Path(__file__).parents[1]
MARK = "HPCSGD_TESTS"
"""The environment variable that marks the processes which the tests have started."""
SHARED_MEMORY = Path("/dev/shm")
LEFT_BY_KILLED = ("mpich_shm_", "sem.mp-")
"""The beginnings of the names of files that MPICH and multiprocessing have in shared memory."""
GRACE = 10.0  # seconds in which killed processes have to end


@dataclass(frozen=True)
class Tier:
    """The tests that a target of the Makefile runs."""

    options: Sequence[str]
    """The options of pytest."""
    workers: str
    """The number of processes of a pytest without a launcher, whose ranks are threads: `auto`, `0` for
    pytest's own process, or empty if only launched ranks run tests."""
    ranks: Sequence[int]
    """The numbers of MPI ranks on which pytest runs."""
    torchrun: Mapping[int, Sequence[str]]
    """The numbers of ranks that torchrun starts, and the tests that run on each of them. These are tests of
    communicators and of code that uses them."""
    patience: float
    """The seconds that a part may take, more than twice those that it takes on two cores."""
    kills: bool
    """True if tests kill programs by SIGKILL, after which a program cannot remove its files."""
    told: str
    """The last lines that are printed when all tests have passed."""


BY_TORCHRUN = ("tests/comm", "tests/methods/test_same_bits.py")
OF_FEW = ("operations", "messages", "service", "posted", "by_node", "stats")
FEW = tuple(f"tests/comm/test_{name}.py" for name in OF_FEW)
WHOLE = "not long and not soak and not large"
TIERS: Mapping[str, Tier] = {
    "test": Tier(
        options=("-m", WHOLE, "--brief"),
        workers="auto",
        ranks=(4,),
        torchrun={},
        patience=1800.0,
        kills=False,
        told="""\
Covered on threads: every method against plain torch on one difficult shape, every part, quantizer and
backend, checkpoints resumed on other shapes, errors, and the examples of the documentation.
Covered on four MPI ranks: one case of each test of the backend and of comparisons with plain torch, and a job
that trains to its accuracy.
More tests: `make test-all` (30 minutes: pairs of parameter values, 2 and 8 MPI ranks, killed and resumed
jobs, Slurm), `make test-long` (two hours), `make soak` (an hour), `make test-openmpi` (the second MPI
library).""",
    ),
    "test-all": Tier(
        options=("-m", WHOLE),
        workers="auto",
        ranks=(2, 4, 8),
        torchrun={2: BY_TORCHRUN, 4: BY_TORCHRUN, 8: FEW},
        patience=3000.0,
        kills=True,
        told="""\
Covered: all tests on threads with all pairs of their parameters' values; those for ranks also on 2, 4 and 8
MPI ranks, comparisons with plain torch for every method; those of communicators also by torchrun.
More tests: `make test-long` (two hours: all combinations), `make soak` (an hour), `make test-openmpi` (the
second MPI library).""",
    ),
    "test-long": Tier(
        options=("-m", "long"),
        workers="0",
        ranks=(2, 4, 8),
        torchrun={4: BY_TORCHRUN},
        patience=10800.0,
        kills=True,
        told="Covered: what `make test-all` leaves out, on threads, on 2, 4 and 8 MPI ranks and by torchrun.",
    ),
    "test-openmpi": Tier(
        options=("-m", WHOLE),
        workers="",
        ranks=(2, 4),
        torchrun={},
        patience=10800.0,
        kills=False,
        told="Covered: the tests on 2 and 4 ranks of Open MPI.",
    ),
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "torchinductor"),  # in TMPDIR otherwise
    # Only Open MPI reads these. They allow root to start jobs, and more ranks than cores.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def main(name: str, mpiexec: str) -> int:
    """Run the tier and return its exit code."""
    tier, began = TIERS[name], time.monotonic()
    shared = owned(SHARED_MEMORY)
    folder = Path(tempfile.mkdtemp(prefix="hpcsgd-"))
    folder.chmod(0o711)  # Slurm's munge, which runs as another user, needs to reach what is inside
    mark = uuid.uuid4().hex
    environment = {**os.environ, **ENVIRONMENT, MARK: mark, "TMPDIR": str(folder)}
    for title, command in parts(tier, mpiexec):
        print(f"== tests on {title}", flush=True)
        process = programs.start(command, cwd=ROOT, env=environment, stdout=None, stderr=None)
        if (code := ended(process, tier.patience, mark)) != 0:
            print(f"make {name} failed: the tests on {title} ended with {code}. Their files are in {folder}.")
            return code
    left = left_running(mark)
    if tier.kills:
        remove(owned(SHARED_MEMORY) - shared)
    else:
        left += left_in(folder)
    if left := [*left, *sorted(map(str, unused(owned(SHARED_MEMORY) - shared)))]:
        print(f"make {name} failed: all tests passed, but they left something behind:", *left, sep="\n  ")
        print("(In /dev/shm, another program of yours may have left it.)")
        return 1
    shutil.rmtree(folder)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(f"make {name} passed in {minutes}:{seconds:02} and left nothing behind.\n{tier.told}")
    return 0


def ended(process: programs.Running, patience: float, mark: str) -> int:
    """Wait for a part and return its exit code; end it on Ctrl-C, or after `patience` seconds.

    In the latter case each pytest writes the calls of its threads, as Python's faulthandler has them.
    """
    try:
        return process.wait(patience)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        return 130
    except programs.TimeoutExpired:
        print(f"The tests are not through after {patience:g} s. What they were at:", flush=True)
        for running in marked(mark):
            with suppress(OSError):
                os.kill(int(running.name), signal.SIGABRT)
        process.wait()
        return 1


def parts(tier: Tier, mpiexec: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a title and a command of each part."""
    pytest = [sys.executable, "-m", "pytest", *tier.options]
    if tier.workers:
        shared = ["--numprocesses", tier.workers, "--dist", "loadfile", "--no-loadscope-reorder"]
        yield "threads", [*pytest, *shared]
    # --capture=sys: otherwise pytest would hide what the MPI library writes when it aborts a job.
    quietly = ["-q", "--color=no", "--capture=sys", "-p", "no:cacheprovider"]
    for n in tier.ranks:
        yield f"{n} MPI ranks", [mpiexec, "-n", str(n), *pytest, "--with-mpi", *quietly]
    for n, tests in tier.torchrun.items():
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "--no-python"]
        yield f"{n} ranks of torchrun", [sys.executable, *agent, *pytest, *quietly, *tests]


def left_running(mark: str) -> list[str]:
    """Return the processes with this mark that still run after at most `GRACE` seconds."""
    deadline = time.monotonic() + GRACE
    while (found := [*marked(mark)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [text for process in found if (text := _shown(process))]


def marked(mark: str) -> Iterator[Path]:
    """Yield the folder in /proc of each process with this mark."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or belongs to another user
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                yield process


def _shown(process: Path) -> str:
    """Return a line about a process; "" if it has just ended."""
    try:
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return f"process {process.name}: {words}"


def left_in(folder: Path) -> list[str]:
    """Return what is in the temporary folder, except pytest's own folders."""
    return sorted(str(path) for path in folder.iterdir() if not path.name.startswith("pytest-of-"))


def owned(folder: Path) -> set[Path]:
    """Return this user's files in a folder that all programs share."""
    found: set[Path] = set()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid():
                found.add(path)
    return found


def remove(files: set[Path]) -> None:
    """Remove what killed programs left in shared memory, and nothing of other programs."""
    for path in unused({path for path in files if path.name.startswith(LEFT_BY_KILLED)}):
        path.unlink(missing_ok=True)


def unused(files: set[Path]) -> set[Path]:
    """Return those of the files that exist and that no process maps into its memory.

    After the tests, mapped files belong to other programs: a process of the tests that still runs is reported
    itself.
    """
    found = set(files)
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has just ended, or belongs to another user
            text = maps.read_text()
            found = {path for path in found if str(path) not in text}
    return {path for path in found if path.exists()}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
