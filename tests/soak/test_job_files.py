"""Invalid job files: one line says what is wrong, and no files are left behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from soak.conftest import Seeds
from soak.job_files import COMMANDS, EXAMPLES, SIMULATION, Case, prepared, smaller, told, typed_for
from soak.sizes import cases

SCRIPTS = {".sbatch", ".pbs", ".flux"}


@dataclass
class Desk:
    """A user's folder with dataset files, and the job files that belong to them."""

    folder: Path
    texts: dict[str, str]
    files: set[Path]

    def swept(self) -> set[Path]:
        """Delete the files that were added to the folder, and return their paths."""
        more = {path for path in self.folder.rglob("*") if "__pycache__" not in path.parts} - self.files
        for path in sorted(more, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        return more


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    texts = prepared(folder)
    (folder / "job.toml").touch()
    return Desk(folder, texts, set(folder.rglob("*")))


@pytest.fixture
def desk(made: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A user's folder on a machine without a scheduler."""
    monkeypatch.chdir(made.folder)
    monkeypatch.setenv("PATH", str(made.folder))
    yield made
    made.swept()


@pytest.mark.slow
@cases(some=50, every=1000)
def test_a_bad_job_file_is_one_line(desk: Desk, seeds: Seeds, cases: int) -> None:
    def case(seed: int) -> None:
        drawn = Case.drawn(seed, desk.texts)
        Path("job.toml").write_bytes(drawn.text)
        ended = told(drawn.words)
        left = desk.swept()
        ended.require_one_line()
        written = {path for path in left if path.suffix}
        assert {path.suffix for path in written} <= SCRIPTS
        assert len(written) <= (ended.code == 0), f"{ended}: {left} is left"
        assert all(path.parent in left or path.parent == desk.folder for path in left)

    seeds.each(cases, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulation", *EXAMPLES])
def test_good_ones_are_taken(desk: Desk, name: str) -> None:
    """Valid job files must be accepted; otherwise the test above would see the same error every time."""
    for command in ["simulate"] if name == "simulation" else sorted({*COMMANDS} - {"job measure"}):
        text = smaller(name, SIMULATION) if name == "simulation" else typed_for(command, desk.texts[name])
        Path("job.toml").write_text(text)
        assert told(Case.words_of(command)).code == 0 or (name, command) == ("gpt_wikitext2", "job probe")


def test_tracebacks_more_lines_and_what_is_left_are_found(desk: Desk) -> None:
    def raises(words: list[str]) -> None:
        raise KeyError(words[0])

    def says(words: list[str]) -> None:
        raise SystemExit("hpcsgd: one\ntwo\n")

    for call in (raises, says):
        with pytest.raises(AssertionError):
            told(["train"], call).require_one_line()
    shutil.copy("job.toml", "half.h5")
    assert desk.swept() == {desk.folder / "half.h5"}


def test_the_same_number_gives_the_same_file(desk: Desk) -> None:
    again = [Case.drawn(seed, desk.texts) for seed in (3, 3, 4)]
    assert again[0] == again[1] != again[2]
