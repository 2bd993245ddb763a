"""Tests of a packed environment, started as on nodes; the original environment has been moved away."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import programs
from cluster.environment import environments
from hpcsgd.cluster.environment import Environment, Packed, ask, changed_since, pack
from hpcsgd.cluster.environment.pack import HEADER, fingerprint
from hpcsgd.cluster.launch.python import of_ranks
from hpcsgd.errors import UserError
from train.launches import unlaunched

pytestmark = pytest.mark.skipif(
    shutil.which("flock") is None, reason="no flock, which nodes of clusters have"
)

SEEN = """
import json, sys, ctypes, sqlite3
import plain, again, elsewhere, inplace
maps = [line.split()[-1] for line in open("/proc/self/maps") if "/" in line]
files = [module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
words = [plain.WORD, again.WORD, elsewhere.WORD, inplace.WORD]
print(json.dumps({"prefix": sys.prefix, "path": sys.path[1:], "files": files + maps, "words": words}))
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Return a pack that is unpacked to $LOCAL. The original environment is gone."""
    folder = tmp_path_factory.mktemp("environment").resolve()
    made = pack(ask(environments.make(folder / "made")), folder / "env.pack", "$LOCAL")
    (folder / "made").rename(folder / "gone")
    return made


@pytest.fixture(scope="module")
def there(packed: Packed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path to which it is unpacked on a node."""
    return on_node(packed, tmp_path_factory.mktemp("node"))


def on_node(packed: Packed, disk: Path) -> Path:
    return disk / f"hpcsgd-{os.getuid()}" / packed.name


def start(packed: Packed, there: Path, *words: str, code: int | None = 0) -> programs.Done:
    environment = unlaunched(LOCAL=str(there.parents[1]))
    environment.pop("PYTHONPATH", None)
    done = programs.run([packed.file, *words], env=environment, check=False)
    assert code is None or done.returncode == code, done.stderr
    return done


@pytest.mark.slow
def test_it_is_python_and_nothing_is_read_from_where_it_was(packed: Packed, there: Path) -> None:
    seen = json.loads(start(packed, there, "-c", SEEN).stdout)
    assert seen["words"] == ["plain", "plain", "linked", "in place"]
    assert seen["prefix"] == str(there)
    shared = (*environments.of_base(), sys.prefix, str(packed.file.parent))
    outside = [path for path in [*seen["path"], *seen["files"]] if path.startswith(shared)]
    assert [path for path in outside if not path.startswith(str(there))] == []


@pytest.mark.slow
def test_its_commands_find_it(packed: Packed, there: Path) -> None:
    start(packed, there, "-c", "")
    command = there / "bin" / "plain"
    assert programs.run([command]).stdout == "plain\n"
    link = there.parents[1] / "link"
    link.symlink_to(command)
    assert programs.run([link]).stdout == "plain\n"


@pytest.mark.slow
def test_words_and_exit_codes_go_through(packed: Packed, there: Path) -> None:
    program = "import sys; print(sys.argv[1:]); sys.exit(75)"
    assert start(packed, there, "-c", program, "a b", "$c", code=75).stdout == "['a b', '$c']\n"


@pytest.mark.slow
def test_ranks_of_a_node_unpack_it_once(packed: Packed, tmp_path: Path) -> None:
    """The first rank unpacks it, even if a killed one left a part. Others wait, and later ones find it."""
    there = on_node(packed, tmp_path)
    (there.parent / f"{packed.name}.part" / "bin").mkdir(parents=True)
    program = f"import os; print(os.stat({str(there)!r}).st_ino)"
    with ThreadPoolExecutor(4) as ranks:
        found = {done.stdout for done in ranks.map(lambda _: start(packed, there, "-c", program), range(4))}
    assert len(found) == 1
    assert {start(packed, there, "-c", program).stdout} == found
    assert {path.name for path in there.parent.iterdir()} == {packed.name, f"{packed.name}.lock"}


@pytest.mark.parametrize("where", ["in a file", "between two files"])
def test_a_file_that_is_not_whole(where: str, made: Environment, tmp_path: Path) -> None:
    """The error is reported, and nothing is left. tar itself does not notice a cut between two files."""
    short = pack(replace(made, standard=[]), tmp_path / "short.pack", "$LOCAL")
    with short.file.open("rb+") as file:
        file.seek(HEADER)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            last = tar.getmember("bin/python").offset
        file.truncate(last if where == "between two files" else last // 2 + 100)
    there = on_node(short, tmp_path)
    done = start(short, there, "-c", "print('never')", code=1)
    assert done.stdout == ""
    assert f"hpcsgd: {short.file}: cannot be unpacked to {there}: not whole, or no room\n" in done.stderr
    assert [path.name for path in there.parent.iterdir()] == [f"{short.name}.lock"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="root gives a folder to another user")
def test_a_folder_of_another_user_is_not_trusted(packed: Packed, tmp_path: Path) -> None:
    there = on_node(packed, tmp_path)
    there.parent.mkdir()
    os.chown(there.parent, 1, 1)
    done = start(packed, there, "-c", "print('never')", code=1)
    assert done.stdout == ""
    assert f"{there.parent}: cannot be made, or another's" in done.stderr
    there.parent.rmdir()
    (there.parents[1] / "theirs").mkdir()
    there.parent.symlink_to("theirs")
    assert "or another's" in start(packed, there, "-c", "", code=1).stderr


def test_the_folder_is_for_its_owner_alone(packed: Packed, there: Path) -> None:
    start(packed, there, "-c", "")
    assert there.parent.stat().st_mode & 0o777 == 0o700


def test_a_variable_that_the_node_does_not_have(packed: Packed) -> None:
    environment = {"PATH": os.environ["PATH"]}
    done = programs.run([packed.file, "-c", ""], env=environment, check=False)
    assert done.returncode != 0
    assert "LOCAL" in done.stderr


def test_ranks_on_other_nodes_are_started_by_the_pack(packed: Packed, there: Path) -> None:
    start(packed, there, "-c", "")
    assert of_ranks(there) == str(packed.file)
    assert of_ranks(there.parent) == sys.executable


def test_the_script_before_the_archive(packed: Packed) -> None:
    with packed.file.open("rb") as file:
        script = file.read(HEADER)
    assert b"@" not in script.replace(b'"$@"', b"")
    programs.run(["sh", "-n"], input=script.decode())


# Checks that are made before anything is packed.


@pytest.fixture
def made(tmp_path: Path) -> Environment:
    return ask(environments.make(tmp_path))


def site(environment: Environment) -> Path:
    return environment.sites[0]


@pytest.mark.slow
def test_the_name_is_that_of_the_contents(made: Environment) -> None:
    name = fingerprint(list(made.members()))
    assert fingerprint(list(made.members())) == name
    (site(made) / "plain" / "__init__.py").write_text("WORD = 'changed'\n")
    assert fingerprint(list(made.members())) != name


def test_a_package_in_place_is_packed_without_the_files_that_refer_to_its_source(
    made: Environment, tmp_path: Path
) -> None:
    """On a node they would make Python read the source of the machine on which it was packed."""
    lead = site(made) / "__editable__.inplace.pth"
    assert [each["leads"] for each in made.editable] == [[str(lead)]]
    sources = {member.source for member in replace(made, standard=[]).members()}
    assert tmp_path / "src" / "inplace" / "__init__.py" in sources
    assert lead not in sources


def test_a_pack_that_is_older_than_its_environment(made: Environment, tmp_path: Path) -> None:
    file = tmp_path / "env.pack"
    file.touch()
    for path in [site(made), *tmp_path.glob("src/inplace/**/*"), tmp_path / "src" / "inplace"]:
        os.utime(path, (1, 1))
    assert not changed_since(made, file)
    os.utime(tmp_path / "src" / "inplace" / "__init__.py")
    os.utime(file, (2, 2))
    assert changed_since(made, file), "a source of a package in place"
    os.utime(tmp_path / "src" / "inplace" / "__init__.py", (1, 1))
    (site(made) / "new").mkdir()
    assert changed_since(made, file), "a package"


def test_what_stays_where_it_is(made: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (site(made) / "far.pth").write_text(f"{tmp_path / 'far'}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    assert set(ask(made.prefix).left) == {tmp_path / "far", tmp_path / "src"}
    monkeypatch.delenv("PYTHONPATH")
    assert ask(made.prefix).left == [tmp_path / "far"]


def test_packages_of_the_base_where_the_environment_sees_them(tmp_path: Path) -> None:
    programs.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "plain"])
    command = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "seeing"]
    programs.run(command)
    assert ask(tmp_path / "plain").of_base == []
    seen = ask(tmp_path / "seeing")
    assert seen.of_base
    assert all(folder.is_relative_to(seen.base) for folder in seen.of_base)


def test_mistakes(made: Environment, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing: not a virtual environment, as python -m venv makes them"):
        ask(tmp_path / "nothing")
    (tmp_path / "conda" / "conda-meta").mkdir(parents=True)
    with pytest.raises(UserError, match=r"an environment of conda, which conda-pack packs"):
        ask(tmp_path / "conda")
    (tmp_path / "broken" / "bin").mkdir(parents=True)
    (tmp_path / "broken" / "pyvenv.cfg").touch()
    python = tmp_path / "broken" / "bin" / "python"
    python.write_text("#!/bin/sh\necho a library >&2\necho is missing >&2\nexit 127\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=f"{python}: does not run: is missing"):
        ask(tmp_path / "broken")
    with pytest.raises(UserError, match='local = "a`b`": expected a folder'):
        pack(made, tmp_path / "env.pack", "a`b`")
    environments.in_place(site(made), "secretive", tmp_path / "src", top_level="")
    with pytest.raises(UserError, match=r"secretive: installed in place .*: install without -e"):
        ask(made.prefix)
