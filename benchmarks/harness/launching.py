"""Run scripts on several ranks, and tasks in several processes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

from harness import programs

Result = TypeVar("Result")
BENCHMARKS = Path(__file__).parents[1]


def on_ranks(n: int, script: Path, arguments: Sequence[str], timeout: float) -> None:
    """Run `python script arguments` on `n` ranks.

    Raise `Failed` if it fails or takes longer than `timeout` seconds.
    """
    start([] if n == 1 else [mpiexec(), "-n", str(n)], script, arguments, timeout)


def start(
    launcher: Sequence[str], script: Path, arguments: Sequence[str], timeout: float, **variables: str
) -> None:
    """Run `launcher python script arguments` with these environment variables; see `on_ranks`."""
    environment = {
        # Otherwise torch warns of hosts without names, and torchft logs everything that it does.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "RUST_LOG": "error",
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # The script is in a subfolder and imports from `benchmarks`; -P keeps its own folder off sys.path.
        "PYTHONPATH": python_path(),
        # Only Open MPI reads these: they allow root to start jobs, and more ranks than cores.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables,
    }
    command = [*launcher, sys.executable, "-P", str(script), *arguments]
    programs.run(command, env=environment, timeout=timeout, capture=False)


def python_path() -> str:
    """Return a PYTHONPATH that contains the folder `benchmarks`."""
    return os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))


def mpiexec() -> str:
    """Return the path of the `mpiexec` next to this Python, or else of the one in PATH."""
    own = Path(sys.executable).with_name("mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit("no mpiexec next to python or in PATH: pip install 'hpcsgd[mpich]'")
    return found


def in_processes(processes: int, tasks: Sequence[partial[Result]]) -> Iterator[Result]:
    """Yield the results of the tasks as they end. The last tasks start first, because they take longest."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        for done in as_completed([pool.submit(task) for task in reversed(tasks)]):
            yield done.result()
