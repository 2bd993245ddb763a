"""The ranks that a launcher started become a topology, and only the necessary modules are loaded."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpcsgd.comm
import programs
from hpcsgd.comm import Communicator, threads
from hpcsgd.errors import JobError, UserError
from hpcsgd.launcher import LAUNCHERS
from hpcsgd.start import form_as_launched

ROOT = Path(__file__).parents[1]


def test_without_a_launcher_it_is_one_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for launcher in LAUNCHERS:
        for name in launcher.variables:
            monkeypatch.delenv(name, raising=False)
    (topology,) = threads.run(1, lambda world: form_as_launched(world, 4, None).topology)
    assert (topology.num_groups, topology.group_size) == (1, 1)
    assert "one rank, one group; groups = 4 is for `mpiexec -n …` or srun" in caplog.text
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    with pytest.raises(UserError, match="groups = 4 is more than the 1 rank"):
        threads.run(1, lambda world: form_as_launched(world, 4, None).topology)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["graphs", "outer_schedules", "quantizers"])
def test_a_public_module_is_there_on_its_first_use(name: str) -> None:
    """No other name has imported the module before."""
    done = programs.run([sys.executable, "-c", f"import hpcsgd; print(hpcsgd.{name}.__name__)"])
    assert done.stdout.endswith(f".{name}\n")


SCRIPT = "import hpcsgd; hpcsgd.init(groups=1)"
COMMANDS = {
    "a script": ["-c", SCRIPT],
    **{name: ["-m", "hpcsgd", name, "examples/digits.toml"] for name in ("train", "probe")},
    "compare": ["-m", "hpcsgd", "compare", "examples/digits.toml", "--methods", "bsp"],
    "measure": ["-m", "hpcsgd", "measure"],
    "doctor": ["-m", "hpcsgd", "doctor"],
}


NO_MPI = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=[] if each in ("a script", "train") else pytest.mark.long)
        for each in COMMANDS
    ],
)
def test_mpiexec_without_an_mpi_library_one_line_says_so(command: str) -> None:
    by_mpiexec = {**NO_MPI, "PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    done = programs.run([sys.executable, *COMMANDS[command]], env=by_mpiexec, cwd=ROOT, check=False)
    assert done.returncode == 1
    said = r"started ranks, but there is no MPI for them \(.*\): start .* `pip install hpcsgd\[mpich\]`\n"
    assert re.fullmatch(rf"hpcsgd: .*mpiexec of MPICH or Intel MPI \(PMI_SIZE\) {said}", done.stderr)


@pytest.mark.slow
def test_one_rank_needs_no_mpi_unless_it_is_asked_for() -> None:
    script = "import hpcsgd; print(hpcsgd.init(groups=1, backend={!r}).world.backend.name)"
    alone = programs.run([sys.executable, "-c", script.format("auto")], env=NO_MPI, cwd=ROOT)
    assert alone.stdout.startswith("gloo of torch")
    forced = programs.run([sys.executable, "-c", script.format("mpi")], env=NO_MPI, cwd=ROOT, check=False)
    assert forced.returncode == 1
    assert re.fullmatch(r"hpcsgd: no MPI library can be loaded \(.*\): .* needs none\n", forced.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_the_guard_is_named_to_workers_that_import_the_script(tmp_path: Path, start: str) -> None:
    body = f"""
import hpcsgd
from torch.utils.data import DataLoader
topology = hpcsgd.init(groups=1)
loader = DataLoader(range(8), 2, num_workers=1, multiprocessing_context={start!r})
print(*[len(batch) for batch in loader])
"""
    (tmp_path / "without.py").write_text(body)
    guarded = body.replace("import hpcsgd\n", "import hpcsgd\nif __name__ == '__main__':\n  ", 1)
    head, rest = guarded.split("  from torch", 1)
    (tmp_path / "with.py").write_text(head + "  from torch" + rest.replace("\n", "\n  "))
    wrong = programs.run([sys.executable, "without.py"], cwd=tmp_path, check=False)
    assert wrong.returncode == 1
    assert 'put what the script does under `if __name__ == "__main__":`' in wrong.stderr.splitlines()[0]
    assert programs.run([sys.executable, "with.py"], cwd=tmp_path).stdout == "2 2 2 2\n"


@pytest.mark.slow
def test_a_method_loads_no_groups() -> None:
    """It also loads none of the modules that only groups need, except those that torch itself has loaded."""
    code = (
        "import sys, torch; before = set(sys.modules); import hpcsgd; hpcsgd.hierarchical, "
        "hpcsgd.ensemble_sync; "
        "print(*(name for name in set(sys.modules) - before "
        "if name.split('.')[0] in ('asyncio', 'socket', 'socketserver') "
        "or name.startswith('hpcsgd.elastic')))"
    )
    done = programs.run([sys.executable, "-c", code])
    assert done.stdout.split() == []


@pytest.mark.slow
def test_a_job_on_cpus_loads_nothing_of_process_groups() -> None:
    """Modules that torch itself has loaded do not count."""
    code = (
        "import sys, torch; before = set(sys.modules); import hpcsgd; from hpcsgd.comm import threads; "
        "from hpcsgd.start import form_as_launched; "
        "threads.run(2, lambda world: form_as_launched(world, 2, None).topology); "
        "print(*(name for name in set(sys.modules) - before if 'distributed' in name))"
    )
    done = programs.run([sys.executable, "-c", code])
    assert done.stdout.split() == []


def test_a_script_asks_for_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcsgd import init

    def ask(world: Communicator) -> None:
        mpi = SimpleNamespace(world=lambda timeout: world)
        monkeypatch.setattr(hpcsgd.comm, "mpi", mpi, raising=False)
        monkeypatch.setitem(sys.modules, "hpcsgd.comm.mpi", mpi)
        monkeypatch.setitem(sys.modules, "hpcsgd.comm.mpi_library", mpi)  # otherwise its import starts MPI
        init(device_backend={"inter_group": "gpu-mpi"})

    with pytest.raises(JobError, match=r"^device_backend inter_group = 'gpu-mpi': did you mean 'gpu_mpi'\?"):
        threads.run(1, ask)
