"""The reader of a command's output may stop reading. This is not an error."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import programs
from hpcsgd.cli import main


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["init", "--help"], ["doctor"]])
@pytest.mark.parametrize("both", [False, True])
def test_a_command_whose_reader_has_gone_ends_in_silence(words: list[str], both: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hpcsgd", *words]
    process = programs.start(command, stdout=writing, stderr=writing if both else programs.PIPE)
    os.close(writing)
    ended = programs.finish(process)
    assert ended.returncode == 1
    assert not ended.stderr


def test_so_does_one_that_has_only_a_mistake_to_tell() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = programs.start([sys.executable, "-m", "hpcsgd", "nonsense"], stdout=writing, stderr=writing)
    os.close(writing)
    assert programs.finish(process).returncode == 1


@pytest.mark.parametrize("words", [["--help"], ["init", "--help"]])
def test_an_output_that_cannot_be_written_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = programs.start([sys.executable, "-m", "hpcsgd", *words], stdout=full, stderr=programs.PIPE)
        ended = programs.finish(process)
    assert ended.returncode == 1
    assert ended.stderr == "hpcsgd: the output cannot be written: No space left on device\n"


def test_a_terminal_that_lacks_characters_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 2), np.float32), y=np.arange(20) % 2)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    main(["data", "convert", "npz", str(tmp_path / "a.npz"), str(tmp_path / "zwölf.h5")])
    assert written.getvalue().startswith(f"{tmp_path}/zw?lf.h5: npz, 18 train".encode())
