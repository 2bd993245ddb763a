"""Tests of bad input in language jobs: every rank reports one line before anything is trained or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data.test_tokenizers import write_tokenizer
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import dump, load
from hpcsgd.core.topology import form
from hpcsgd.data import Windows
from hpcsgd.data.tokenizers import ByteTokenizer, fingerprint
from hpcsgd.errors import JobError, UserError
from hpcsgd.train.training_setup import assemble
from train.export.test_export import write_text
from train.launches import launch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path, "bytes")
    return tmp_path


def cut_off(folder: Path) -> str:
    whole = (folder / "text.h5").read_bytes()
    (folder / "text.h5").write_bytes(whole[: len(whole) // 2])
    return "[data] arguments: {folder}/text.h5: not a dataset file, or damaged (..."


def another_tokenizer(folder: Path) -> str:
    own = fingerprint(write_tokenizer(folder).read_bytes())
    with_key(folder, "bptt = 6", 'bptt = 6, tokenizer = "bpe300.json"')
    return (
        f"[data] arguments: tokenizer {{folder}}/bpe300.json ({own}) is not the one that made "
        f"{{folder}}/text.h5: bytes, 256 types ({fingerprint(ByteTokenizer.definition)}); "
        "convert the text again"
    )


def no_tokenizer(folder: Path) -> str:
    with_key(folder, "bptt = 6", 'bptt = 6, tokenizer = "none.json"')
    return (
        "[data] arguments: tokenizer '{folder}/none.json': neither 'bytes' nor a file that can be read "
        "(No such file or directory)"
    )


def too_few_types(folder: Path) -> str:
    with_key(folder, "types = 256", "types = 200")
    return (
        "[model]: gpt does not take samples of shape [6] with numbers up to 255: index out of range in self"
    )


def too_long_windows(folder: Path) -> str:
    with_key(folder, "bptt = 6", "bptt = 60000")
    return "[data] arguments: bptt = 60000: the 980 tokens of split 'train' of {folder}/text.h5 are too few"


def with_key(folder: Path, key: str, changed: str) -> None:
    job = folder / "job.toml"
    assert key in job.read_text()
    job.write_text(job.read_text().replace(key, changed))


MISTAKES = [cut_off, another_tokenizer, no_tokenizer, too_few_types, too_long_windows]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_rank_tells_the_same(folder: Path, mistake: Callable[[Path], str]) -> None:
    line = "job.toml: " + mistake(folder).replace("{folder}", str(folder))

    def refused(world: Communicator) -> str:
        with pytest.raises(JobError) as caught:
            assemble(load(folder / "job.toml"), form(world, 2), "job.toml")
        return str(caught.value)

    first, second = threads.run(2, refused)
    assert first == second
    assert first == line or (line.endswith("...") and first.startswith(line[:-3]))


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "at"), [(cut_off, ":2"), (another_tokenizer, ":2"), (too_few_types, "")])
def test_launched_it_is_one_line_and_nothing_stays(
    folder: Path, mistake: Callable[[Path], str], at: str
) -> None:
    """If a whole section is wrong, a flag may be the reason, so the message names no line of the file."""
    line = f"hpcsgd: job.toml{at}: " + mistake(folder).replace("{folder}", str(folder))
    before = set(folder.rglob("*"))
    done = launch(folder, "train", "job.toml", "--parallel.groups", "2", n=2)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err == line + "\n" or (line.endswith("...") and done.err.startswith(line[:-3]))
    assert set(folder.rglob("*")) == before


def test_where_a_tokenizer_is_meant_from(folder: Path) -> None:
    """A path in the job file is relative to its folder, one on the command line to the working directory."""
    with_key(folder, "bptt = 6", 'bptt = 6, tokenizer = "a/t.json"')
    job = folder / "job.toml"
    assert load(job).data.arguments["tokenizer"] == str(folder / "a" / "t.json")
    typed = "--data.arguments.tokenizer"
    assert load(job, [typed, "t.json"]).data.arguments["tokenizer"] == str(Path.cwd() / "t.json")
    assert load(job, [typed, "bytes"]).data.arguments["tokenizer"] == "bytes"
    table = '{bptt = 6, tokenizer = "t.json"}'
    assert load(job, ["--data.arguments", table]).data.arguments["tokenizer"] == str(Path.cwd() / "t.json")
    (folder / "again.toml").write_text(dump(load(job)))
    assert load(folder / "again.toml").data == load(job).data


def test_a_store_that_is_cut_off_while_it_is_read(folder: Path) -> None:
    """Without this check the kernel would kill a process that reads there."""
    data = Windows(folder / "text.h5", "train", bptt=6)
    assert len(data[0][0]) == 6
    with (folder / "text.h5").open("rb+") as file:
        file.truncate(100)
    with pytest.raises(UserError, match="the file has been cut off since it was opened; convert it again"):
        data[len(data) - 1]
