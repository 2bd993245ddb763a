"""Tests of ``hpcsgd job pack``, and of what ``hpcsgd job train`` reports about the pack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.environment import environments
from hpcsgd.cli import main
from train.launches import JOB, make_store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


@pytest.mark.slow
def test_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = environments.make(folder / "made")
    (folder / "far").mkdir()
    (next(prefix.glob("lib/python*/site-packages")) / "far.pth").write_text(f"{folder / 'far'}\n")
    (folder / "site.toml").write_text('pack = "packs/env.pack"\nlocal = "$SCRATCH"\n')
    (folder / "packs").mkdir()
    main(["job", "pack", str(prefix)])
    packed, unpacks, left = capsys.readouterr().out.splitlines()
    assert packed.startswith("packed    packs/env.pack: ")
    assert packed.endswith(f" files of {prefix}")
    assert unpacks.startswith("unpacks   to $SCRATCH/hpcsgd-UID/")
    assert left == f"left      {folder / 'far'}: on the path of Python, and read from where it is"
    main(["job", "pack", str(prefix), "--to", "other.pack"])
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == 'use       pack = "other.pack" in site.toml, or other.pack for python'
    assert os.access("other.pack", os.X_OK)


def test_what_cannot_be_packed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["job", "pack", "nothing"])
    expected = "hpcsgd: nothing: not a virtual environment, as python -m venv makes them\n"
    assert capsys.readouterr().err == expected
    assert not (folder / "env.pack").exists()


def test_a_job_says_where_its_pack_is_old(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(folder / "small.h5")
    (folder / "job.toml").write_text(JOB)
    (folder / "site.toml").write_text('pack = "env.pack"\n')
    (folder / "env.pack").write_text("#!/bin/sh\n")
    (folder / "env.pack").chmod(0o755)
    prefix = environments.make(folder / "made")
    monkeypatch.setattr("sys.prefix", str(prefix))
    monkeypatch.setenv("PATH", str(folder))  # there is no scheduler here
    main(["job", "train", "job.toml"])
    assert "\npython    env.pack, older than this environment: hpcsgd job pack\n" in capsys.readouterr().out
    (folder / "env.pack").write_text("#!/bin/sh\n# newer\n")
    main(["job", "train", "job.toml"])
    assert "\npython    env.pack\n" in capsys.readouterr().out
