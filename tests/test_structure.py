"""The structure of the code follows CONTRIBUTING.md. Each check must refuse a made-up tree."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import programs
from hpcsgd.launcher import LAUNCHERS
from program_starts import program_starts

ROOT = Path(__file__).parents[1]
LONGEST = 300
SUFFIXES = {".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
NAMELESS = re.compile(r"(^|_)(utils?|helpers?|misc|common)($|_)")
# A path on somebody's machine. As a default it works only for its author.
ABSOLUTE = re.compile(r"""["'](/(home|root|work|Users|scratch|data|mnt)/[^"']*|~/[^"']*)["']""")

_NAMES = r"(cuda|xpu|mps|accelerator|Stream|Event)\b"
DEVICES = re.compile(rf"\btorch\.{_NAMES}|\bfrom torch import .*\b{_NAMES}")
DOORS = ("hpcsgd/comm/streams.py", "hpcsgd/kernels/cuda.py")

_READS = r"(?<!\w)(pickle|cloudpickle|dill|joblib|marshal|shelve)\b(?=[.\s]|$)"
_BETWEEN = r"comm\.(all)?(bcast|gather|scatter|reduce|alltoall|send|recv|sendrecv)\((?!.*\.wait\(\))"
"""Calls of mpi4py that send objects. A call whose result is waited for is one of our communicators."""
_TORCH = r"\btorch\.load\((?!.*weights_only=True)|\bnp\.load\((?!.*allow_pickle=False)|\bFileSystemReader\("
PICKLES = re.compile(rf"^\s*(import|from) {_READS}|{_BETWEEN}|{_TORCH}|weights_only=False|allow_pickle=True")
UNPICKLING = {
    "hpcsgd/data/formats/pickled.py": "knows arrays and containers only",
    "hpcsgd/models/metadata.py": "knows the index of a checkpoint only",
    "hpcsgd/models/weights.py": "after metadata.py has looked at it",
    "hpcsgd/comm/gloo.py": "between ranks of one job",
    "hpcsgd/comm/mpi.py": "between ranks of one job",
    "hpcsgd/comm/threads.py": "between ranks that are threads",
}
"""Files that unpickle objects, and why no outsider can write the data; docs/security.md says the same."""


def sources(root: Path) -> Iterator[Path]:
    for folder in ("hpcsgd", "csrc"):
        yield from sorted(p for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)


def too_long(root: Path) -> list[str]:
    lengths = {path: len(path.read_text().splitlines()) for path in sources(root)}
    return [f"{p.relative_to(root)}: {n} lines, allowed {LONGEST}" for p, n in lengths.items() if n > LONGEST]


def misnamed(root: Path) -> list[str]:
    """Return the files and folders whose names do not describe what is in them."""
    paths = [path.relative_to(root) for path in sources(root)]
    return [str(p) for p in paths if any(NAMELESS.search(part) for part in p.with_suffix("").parts)]


def absolute_paths(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{number}: {found[0]}"
        for path in sources(root)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := ABSOLUTE.search(line))
    ]


def outside_the_door(root: Path) -> list[str]:
    """Return the lines that use torch's names for streams, events and kinds of devices."""
    return [
        f"{path.relative_to(root)}:{number}: {found[0]}"
        for path in sources(root)
        if path.suffix == ".py" and str(path.relative_to(root)) not in DOORS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := DEVICES.search(line))
    ]


def unpickling(root: Path) -> dict[str, str]:
    """Return the files that may run what somebody else wrote into a file or a message.

    For each file, return the first such line.
    """
    found: dict[str, str] = {}
    for path in sources(root):
        for line in path.read_text().splitlines() if path.suffix == ".py" else []:
            if PICKLES.search(line):
                found.setdefault(str(path.relative_to(root)), line.strip())
    return found


def read_from_launchers(root: Path) -> list[str]:
    """Return the lines outside the table of launchers that name a variable of a launcher."""
    names = {name for launcher in LAUNCHERS for name in launcher.variables}
    named = re.compile("|".join(rf"\b{name}\b" for name in sorted(names)))
    return [
        f"{path.relative_to(root)}:{number}: {found[0]}"
        for path in sources(root)
        if str(path.relative_to(root)) != "hpcsgd/launcher.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := named.search(line))
    ]


def starting(root: Path) -> list[str]:
    """Return the lines where tests start a program without the limits that `programs` sets for all."""
    return [
        f"{path.relative_to(root)}:{line}: {what}"
        for path in sorted((root / "tests").rglob("*.py"))
        if path.name
        not in {"programs.py", "test_supervisor.py"}  # the second one delays hpcsgd's own program starts
        for line, what, _ in program_starts(path)
    ]


def lint_imports(root: Path) -> programs.Done:
    """Check the package in `root` for the contracts of pyproject.toml."""
    call = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return programs.run([sys.executable, "-c", call], cwd=root, check=False)


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def package(root: Path, files: dict[str, str]) -> Path:
    """Create a made-up hpcsgd with the project's own contracts."""
    shutil.copy(ROOT / "pyproject.toml", root)
    good = {
        "__init__.py": "",
        "comm/__init__.py": "",
        "comm/mpi.py": "import mpi4py",
        "core/__init__.py": "",
        "core/flat.py": "",
        **dict.fromkeys(("cluster/__init__.py", "parts/__init__.py", "performance/__init__.py"), ""),
    }
    return plant(root, {f"hpcsgd/{name}": text for name, text in (good | files).items()})


def test_there_is_something_to_check():
    assert ROOT / "hpcsgd/errors.py" in sources(ROOT)


def test_no_file_is_too_long():
    assert too_long(ROOT) == []


def test_a_long_file_is_found(tmp_path):
    plant(
        tmp_path, {"hpcsgd/a.py": "x = 1\n" * 300, "hpcsgd/b/c.py": "x = 1\n" * 301, "csrc/d.cu": "\n" * 301}
    )
    assert too_long(tmp_path) == [
        "hpcsgd/b/c.py: 301 lines, allowed 300",
        "csrc/d.cu: 301 lines, allowed 300",
    ]


def test_names_say_something():
    assert misnamed(ROOT) == []


def test_a_nameless_file_is_found(tmp_path):
    names = ["hpcsgd/utils.py", "hpcsgd/train_helper.py", "hpcsgd/helpers/x.py", "hpcsgd/utility.py"]
    plant(tmp_path, dict.fromkeys(names, ""))
    assert set(misnamed(tmp_path)) == set(names) - {"hpcsgd/utility.py"}


def test_what_launchers_leave_is_known_in_one_place():
    assert read_from_launchers(ROOT) == []


def test_a_variable_of_a_launcher_is_found_elsewhere(tmp_path):
    text = 'a = os.environ["PMI_RANK"]\nb = "SLURM_JOB_ID"\nc = "MY_PMI_RANK"\n'
    plant(tmp_path, {"hpcsgd/a.py": text, "hpcsgd/launcher.py": text})
    assert read_from_launchers(tmp_path) == ["hpcsgd/a.py:1: PMI_RANK"]


@pytest.mark.slow
def test_tests_start_programs_in_one_place():
    assert starting(ROOT) == []


def test_a_program_started_elsewhere_is_found(tmp_path):
    files = {
        "tests/a.py": "import subprocess\n\ndef f():\n    return subprocess.run(['a']).stdout\n",
        "tests/b.py": "from subprocess import check_output\n",
        "tests/c/d.py": "import os\nos.system('a')\n",
        "tests/e.py": "text = 'subprocess.run()'  # subprocess.run()\nimport programs\nprograms.run(['a'])\n",
        "tests/programs.py": "import subprocess\nsubprocess.Popen(['a'])\n",
    }
    plant(tmp_path, files)
    assert starting(tmp_path) == [
        "tests/a.py:4: subprocess.run",
        "tests/b.py:1: subprocess.check_output",
        "tests/c/d.py:2: os.system",
    ]


def test_no_path_of_one_machine():
    assert absolute_paths(ROOT) == []


def test_a_path_of_one_machine_is_found(tmp_path):
    text = 'A = "/home/me/x"\nB = "/dev/null"\nC = "home/x"\n\nD = \'~/runs\'\n'
    plant(tmp_path, {"hpcsgd/a.py": text})
    assert absolute_paths(tmp_path) == ['hpcsgd/a.py:1: "/home/me/x"', "hpcsgd/a.py:5: '~/runs'"]


def test_one_door_to_devices():
    assert outside_the_door(ROOT) == []


def test_a_device_beside_the_door_is_found(tmp_path):
    files = {
        "hpcsgd/kernels/cuda.py": "import torch\ntorch.cuda.device(0)\n",
        "hpcsgd/engine/step.py": "import torch\n\ntorch.cuda.synchronize()\n",
        "hpcsgd/core/flat.py": "from torch import Event, Tensor\nx.is_cuda\ntorch.Event()",
        "hpcsgd/core/norm.py": "x = 1  # torch.cudaless",
    }
    plant(tmp_path, files)
    assert outside_the_door(tmp_path) == [
        "hpcsgd/core/flat.py:1: from torch import Event",
        "hpcsgd/core/flat.py:3: torch.Event",
        "hpcsgd/engine/step.py:3: torch.cuda",
    ]


def test_imports_keep_their_contracts():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_sound_package_keeps_the_contracts(tmp_path):
    done = lint_imports(package(tmp_path, {"core/flat.py": "import hpcsgd.comm.mpi"}))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_import_upwards_is_found(tmp_path):
    done = lint_imports(package(tmp_path, {"comm/mpi.py": "def f():\n    import hpcsgd.core.flat"}))
    assert done.returncode == 1
    assert "hpcsgd.comm is not allowed to import hpcsgd.core" in done.stdout


def test_data_and_models_do_not_know_training(tmp_path):
    files = {
        "train/__init__.py": "",
        "data.py": "import hpcsgd.train",
        "models.py": "import hpcsgd.cli",
    }
    done = lint_imports(package(tmp_path, files | {"cli.py": ""}))
    assert done.returncode == 1
    assert "hpcsgd.data is not allowed to import hpcsgd.train" in done.stdout
    assert "hpcsgd.models is not allowed to import hpcsgd.cli" in done.stdout


def test_the_library_does_not_know_job_files(tmp_path):
    files = {"config/__init__.py": "", "methods/__init__.py": "", "methods/a.py": "import hpcsgd.config"}
    done = lint_imports(package(tmp_path, files))
    assert done.returncode == 1
    assert "hpcsgd.methods is not allowed to import hpcsgd.config" in done.stdout


def test_parts_that_know_those_beside_them_are_found(tmp_path):
    files = {
        "parts/quantizers/__init__.py": "import hpcsgd.parts.averagers",
        "parts/averagers/__init__.py": "",
        "methods/__init__.py": "",
        "parts/averagers/mean.py": "import hpcsgd.methods",
    }
    done = lint_imports(package(tmp_path, files))
    assert done.returncode == 1
    assert "hpcsgd.parts.quantizers is not allowed to import hpcsgd.parts.averagers" in done.stdout
    assert "hpcsgd.parts is not allowed to import hpcsgd.methods" in done.stdout


def test_mpi_outside_comm_is_found(tmp_path):
    done = lint_imports(package(tmp_path, {"core/flat.py": "def f():\n    from mpi4py import MPI"}))
    assert done.returncode == 1
    assert "hpcsgd is not allowed to import mpi4py" in done.stdout
    assert "hpcsgd.core.flat -> mpi4py" in done.stdout


def test_a_socket_outside_comm_and_elastic_is_found(tmp_path):
    files = {
        "elastic/__init__.py": "",
        "elastic/ring.py": "import socket",
        "core/flat.py": "def f():\n    import socket",
    }
    done = lint_imports(package(tmp_path, files))
    assert done.returncode == 1
    assert "hpcsgd.core.flat -> socket" in done.stdout
    assert "hpcsgd.elastic.ring -> socket" not in done.stdout


def test_a_module_without_a_place_is_found(tmp_path):
    done = lint_imports(package(tmp_path, {"newcomer.py": ""}))
    assert done.returncode == 1
    assert "newcomer" in done.stdout


def test_nothing_of_others_is_unpickled():
    assert set(unpickling(ROOT)) == set(UNPICKLING), unpickling(ROOT)
    told = (ROOT / "docs" / "security.md").read_text()
    assert [path for path in UNPICKLING if path not in told] == []


def test_unpickling_is_found(tmp_path):
    lines = (
        "import pickle", "from pickle import loads", "    import dill", "self._comm.allgather(x)",
        "comm.recv(source=0)",
        "torch.load(path)", "torch.load(path, map_location='cpu')", "np.load(file)", "f(weights_only=False)",
    )  # fmt: skip
    harmless = (
        "torch.load(path, weights_only=True)", "np.load(file, allow_pickle=False)", "# import pickle",
        "comm.Send(x)", "comm.allreduce(x).wait()",
        "world.send(x, 1)", "from hpcsgd.data.formats.pickled import load_dictionary",
    )  # fmt: skip
    plant(tmp_path, {f"hpcsgd/a{i}.py": f"{line}\n" for i, line in enumerate(lines)})
    plant(tmp_path, {f"hpcsgd/b{i}.py": f"{line}\n" for i, line in enumerate(harmless)})
    assert list(unpickling(tmp_path).values()) == [line.strip() for line in lines]


def inheriting_stdin(root: Path) -> list[str]:
    """Return the lines that start a program with our stdin, whose content is not meant for that program."""
    return [
        f"{path.relative_to(root)}:{line}: {what}"
        for path in sources(root)
        if path.suffix == ".py"
        for line, what, given in program_starts(path)
        if not given & {"stdin", "input"}
    ]


@pytest.mark.slow
def test_programs_do_not_have_our_stdin():
    assert inheriting_stdin(ROOT) == []


def test_a_program_that_has_our_stdin_is_found(tmp_path):
    files = {
        "hpcsgd/a.py": "import subprocess\n\ndef f():\n    return subprocess.run(['a'], text=True).stdout\n",
        "hpcsgd/b.py": "asyncio.create_subprocess_exec('a', stdout=PIPE)\n",
        "hpcsgd/c.py": "from subprocess import Popen\n",
        "hpcsgd/d.py": "subprocess.run(['a'], stdin=subprocess.DEVNULL)\nsubprocess.run(['a'], input='')\n",
        "hpcsgd/e.py": "text = 'subprocess.run()'  # subprocess.run()\n",
    }
    plant(tmp_path, files)
    assert inheriting_stdin(tmp_path) == [
        "hpcsgd/a.py:4: subprocess.run",
        "hpcsgd/b.py:1: asyncio.create_subprocess_exec",
        "hpcsgd/c.py:1: subprocess.Popen",
    ]
