"""Bounds for the number of files that a rank opens as it starts; from a pack it opens almost none."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import hpcsgd
import programs
from cluster.environment import environments
from hpcsgd.cluster.environment import ask, pack
from train.launches import JOB, ended, make_store, start, unlaunched

SCRIPT = Path(__file__).with_name("counted.py")
OPENS = 2600
"""For a rank that plots nothing: 2412 with torch 2.13, of which torch and its compiler have 1544."""
OURS = 380
"""The part of them that belongs to the package itself: 380."""
PATIENCE = 900.0  # seconds; two GB are packed and unpacked
UNUSED = ("matplotlib", "scipy", "rich", "PIL", "transformers", "plotly", "jinja2")
"""Packages that a rank does not import if it plots nothing."""
FROM_A_PACK = 30
"""Opens below environment and interpreter: the pack, and libraries for which the loader looks there first."""


def counted(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return the opens of two ranks, with the whole package compiled, as in an installation."""
    compileall.compile_dir(hpcsgd.__path__[0], quiet=1)
    command = [programs.mpiexec(), "-n", "2", sys.executable, str(SCRIPT), str(folder), *words]
    done = ended(start(folder, command, PYTHONPATH=str(Path(hpcsgd.__file__).parents[1])))
    assert done.code == 0, done.err
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def traced(
    folder: Path, command: Sequence[str | Path], timeout: float = programs.TIMEOUT
) -> list[tuple[str, str]]:
    """Return all system calls about files of a command and its children, as pairs of call and path."""
    if (strace := shutil.which("strace")) is None:
        pytest.skip("no strace, which tells what libraries open, too")
    out = folder / "trace"
    environment = unlaunched()
    environment.pop("PYTHONPATH", None)
    done = programs.run(
        [strace, "-f", "-qq", "-e", "trace=%file", "-o", out, *command],
        cwd=folder, env=environment, timeout=timeout, check=False,
    )  # fmt: skip
    if "ptrace" in done.stderr and done.returncode != 0:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lines = (re.search(r"(\w+)\([^\"]*\"([^\"]*)\"", line) for line in out.read_text().splitlines())
    return [(found[1], str(folder / found[2])) for found in lines if found]


def below(calls: Sequence[tuple[str, str]], *folders: str) -> Counter[str]:
    """Count the calls on paths below `folders`, by call. Calls of `exec` are searches of PATH."""
    return Counter("open" if "open" in call else call for call, path in calls if path.startswith(folders))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.mark.slow
def test_a_rank_opens_no_more_than_it_did(folder: Path) -> None:
    drawing, other = counted(folder, "train", "job.toml", "--training.epochs", "1")
    loaded = {name.partition(".")[0] for name in other["modules"]}
    assert sorted(loaded & set(UNUSED)) == []
    assert "matplotlib" in {name.partition(".")[0] for name in drawing["modules"]}, "rank 0 draws"
    ours = f"{Path(hpcsgd.__file__).parent}/"
    opened = Counter("ours" if path.startswith(ours) else "others'" for path in other["opened"])
    assert 0 < opened["ours"] <= OURS, opened
    assert opened.total() <= OPENS, opened


def test_commands_that_train_nothing_do_without_torch(folder: Path) -> None:
    for rank in counted(folder, "job", "pack", "--help"):
        loaded = {name.partition(".")[0] for name in rank["modules"]}
        assert sorted(loaded & {"torch", "numpy", "h5py", "mpi4py", *UNUSED} - {"rich"}) == []


@pytest.mark.slow
def test_from_a_pack_the_shared_file_system_is_left_alone(tmp_path: Path) -> None:
    """Run a Python that imports a package of its environment and half of the standard library."""
    program = "import plain, json, asyncio, sqlite3, email.message, xml.dom.minidom, unittest.mock"
    prefix = environments.make(tmp_path / "made")
    file = pack(ask(prefix), tmp_path / "env.pack", str(tmp_path / "local")).file
    (tmp_path / "local").mkdir()
    programs.run([file, "-c", program])
    shared = (str(prefix), str(tmp_path / "made"), *environments.of_base(), str(file))
    plain = below(traced(tmp_path, [prefix / "bin" / "python", "-c", program]), *shared)
    ours = below(traced(tmp_path, [file, "-c", program]), *shared)
    assert plain["open"] > 100, "there is something to be saved"
    assert ours["open"] <= FROM_A_PACK, ours
    assert ours.total() <= 3 * FROM_A_PACK, ours


@pytest.mark.long
@pytest.mark.large
@pytest.mark.timeout(PATIENCE)
def test_a_training_from_a_pack_leaves_the_shared_file_system_alone(folder: Path) -> None:
    """Run a whole training, for which two GB are packed and unpacked."""
    prefix = Path(sys.prefix)
    if not (prefix / "pyvenv.cfg").exists():
        pytest.skip("these tests do not run in a virtual environment")
    file = pack(ask(prefix), folder / "env.pack", str(folder)).file
    train = ["-m", "hpcsgd", "train", "job.toml", "--parallel.groups", "1", "--run.output_dir"]
    programs.run([file, "-c", ""], env=os.environ | {"PYTHONPATH": ""}, timeout=PATIENCE)
    found = traced(folder, [file, *train, "packed"], PATIENCE)
    sources = str(Path(hpcsgd.__file__).parents[2])
    shared = below(found, str(prefix), str(prefix.resolve()), sys.base_prefix, sources, str(file))
    assert shared["open"] <= FROM_A_PACK, shared
    assert below(found, str(folder / f"hpcsgd-{os.getuid()}"))["open"] > 1000, "it trains"
