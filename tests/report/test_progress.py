from __future__ import annotations

import io
import logging
import time

import pytest
from rich.console import Console

from hpcsgd.report.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal() -> Console:
    return Console(file=Terminal(), force_terminal=True, width=140)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def report(progress: Progress) -> None:
    progress.step(step=340, epoch=2, loss=0.412, lr=0.2, speed="1,234 samples/s")


def test_one_readable_line_and_nothing_drawn(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "hpcsgd")
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress(1700, 10, first_step=300) as progress:
        now[0] += 40.0
        report(progress)
        progress.note("test accuracy 97 %, [best]")
    line = "epoch 2/10  step 340/1700  loss 0.412  lr 0.2  1,234 samples/s  eta 0:22:40"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", line),
        ("INFO", "test accuracy 97 %, [best]"),
    ]
    assert capsys.readouterr().out == ""


def test_a_run_without_an_end_has_a_time_to_go_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hpcsgd")
    with Progress(2**70, 2**63, first_step=300) as progress:
        report(progress)
    assert " eta " in caplog.text


def test_a_terminal_shows_a_bar_and_lines_go_to_the_log_file_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "hpcsgd")
    console = terminal()
    with Progress(1700, 10, console=console) as progress:
        report(progress)
        progress.note("test accuracy 97 %, [best]")
    assert "step 340/1700" in text_of(console)
    assert "test accuracy 97 %, [best]\n" in text_of(console)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]


def test_a_silenced_rank_draws_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hpcsgd")
    console = terminal()
    with Progress(1700, 10, console=console) as progress:
        report(progress)
        progress.note("nothing")
    assert text_of(console) == ""
    assert not caplog.records
