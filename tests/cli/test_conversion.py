"""Conversion of image folders on the command line: the output, the progress, and mistakes in one line."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from data.pictures import write_classes, write_pngs
from hpcsgd.cli import app, main
from hpcsgd.cli.conversion import progress_of


def test_images_and_pairs_are_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store.h5"
    app(["data", "convert", "images", str(write_classes(tmp_path / "images")), str(store), "--size", "14"])
    told = capsys.readouterr()
    assert told.out.startswith(f"{store}: images, 12 train, 6 test, 3 x 14 x 14, 2 classes, ")
    assert told.err == "18 of 18 images\n"
    app(["data", "convert", "pairs", str(write_pngs(tmp_path / "pngs")), str(store), "--scale", "2"])
    told = capsys.readouterr()
    assert told.out.startswith(
        f"{store}: pairs, 3 train, 2 test, reduced 2 times, to 12 pixels a side or more, "
    )
    assert told.err == "5 of 5 images\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("images nowhere s.h5", "nowhere: no such file or folder; a folder with train/ and val/ is needed"),
        ("images . s.h5", ".: no folder train/ in it, with the images to train on"),
        ("images . s.h5 --size 0", "size = 0: a sample has 1 to 16384 pixels a side"),
        ("pairs . s.h5 --scale 3", "scale = 3: images are reduced 2 or 4 times"),
        ("pairs . s.h5", 'Command "data convert pairs" parameter --scale requires an argument.'),
        ("images .", 'Command "data convert images" parameter DST requires an argument.'),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: str,
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["data", "convert", *words.split()])
    assert ended.value.code == 1
    assert capfd.readouterr().err == f"hpcsgd: {line}\n"


@pytest.mark.parametrize("watched", [False, True])
def test_lines_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], watched: bool
) -> None:
    """At 100 images per second, a line appears every ten seconds, or every half second on a terminal."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched, raising=False)
    told = progress_of()
    for done in range(0, 4001, 25):
        now = done / 100
        told(done, 4000)
    err = capsys.readouterr().err
    if watched:
        lines = err.split("\r")[1:]
        assert len(lines) == 80
        assert lines[-1] == f"{'4,000 of 4,000 images':<60}\n"
        assert err.count("\n") == 1
        assert lines[39].strip() == "2,000 of 4,000 images, 0:00:20 left"
    else:
        assert err.splitlines() == [
            "1,000 of 4,000 images, 0:00:30 left",
            "2,000 of 4,000 images, 0:00:20 left",
            "3,000 of 4,000 images, 0:00:10 left",
            "4,000 of 4,000 images",
        ]
