"""The reader of a command's output may stop reading. This is not an error."""

from __future__ import annotations

import os
import sys

import pytest

import programs


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
