"""Each part of the page about tools that start training works with the real tool, where it is installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import programs
from pythons import python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/workflows.md").read_text()
HYDRA = ROOT / "examples/hydra_submitit"
RANKS = 4
PATIENCE = 400.0
"""Seconds that a test may take; ranks that a tool starts import torch each time."""
HPCSGD = f"{shlex.quote(sys.executable)} -m hpcsgd"
SNAKEMAKE = os.environ.get("SNAKEMAKE") or shutil.which("snakemake")
"""The path of snakemake, which may be in a separate environment."""


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def runnable(command: str) -> str:
    """Return `command` with the launcher and the Python of these tests."""
    return command.replace("mpiexec", programs.mpiexec()).replace("hpcsgd train", f"{HPCSGD} train")


def prepare(folder: Path) -> None:
    shutil.copy(ROOT / "examples/digits.toml", folder)
    programs.run(python("-m", "hpcsgd", "data", "convert", "digits", "digits.h5"), cwd=folder)


def test_the_page_shows_a_part_of_the_script_for_hydra() -> None:
    assert block("python") in (HYDRA / "train.py").read_text()
    launcher = yaml.safe_load((HYDRA / "config.yaml").read_text())["hydra"]["launcher"]
    assert launcher["nodes"] * launcher["tasks_per_node"] == RANKS


@pytest.mark.long
@pytest.mark.timeout(PATIENCE)
def test_hydra_and_submitit_start_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    shutil.copytree(HYDRA, tmp_path / "job")
    command = [sys.executable, "train.py", "--multirun", "lr=0.1,0.05"]
    programs.run(command, cwd=tmp_path / "job", timeout=PATIENCE)
    printed = "".join(path.read_text() for path in (tmp_path / "job").rglob("*_log.out"))
    found = re.findall(r"^lr (\S+): loss \d\.\d+ on 2 × 2 ranks$", printed, re.MULTILINE)
    assert sorted(found) == ["0.05", "0.1"]
    assert len(list((tmp_path / "job/multirun").glob("*/*/*/checkpoints"))) == len(found)


def sweep_command(values: dict[str, Any]) -> list[str]:
    """Return the command of the page's sweep for one training, as W&B's agent makes it from `values`."""
    sweep = yaml.safe_load(block("yaml"))
    assert values.keys() == sweep["parameters"].keys()
    filled = {"${program}": [sweep["program"]], "${args}": [f"--{key}={x}" for key, x in values.items()]}
    return [word for each in sweep["command"] for word in filled.get(each, [runnable(each)])]


@pytest.mark.long
def test_the_command_of_a_sweep_trains(tmp_path: Path) -> None:
    prepare(tmp_path)
    command = sweep_command({"optimizer.lr": 0.02, "method.sync_every": 8})
    more = ["--training.epochs", "1"]
    programs.run([*command, *more], cwd=tmp_path, env={**os.environ, "WANDB_RUN_ID": "abc"})
    metrics = [json.loads(line) for line in (tmp_path / "runs/abc/metrics.jsonl").read_text().splitlines()]
    kind, value = yaml.safe_load(block("yaml"))["metric"]["name"].split("/")
    assert [value in each for each in metrics if each["kind"] == kind] == [True]
    assert {each["step"] for each in metrics if each["kind"] == "sync"} == {8, 16}


@pytest.mark.long
def test_wandb_makes_the_same_arguments() -> None:
    pytest.importorskip("wandb")
    make: Any = import_module("wandb.sdk.launch.sweeps.utils")
    made = make.create_sweep_command_args({"args": {"optimizer.lr": {"value": 0.02}}})
    assert made["args"] == ["--optimizer.lr=0.02"]


@pytest.mark.long
def test_a_rule_of_snakemake_continues_after_75(tmp_path: Path) -> None:
    if SNAKEMAKE is None:
        pytest.skip("snakemake is not installed")
    prepare(tmp_path)
    rule = runnable(block("snakemake"))
    assert "--resume" in rule
    limited = rule.replace("--resume", "--resume --training.epochs 2 --training.time_limit_s $LIMIT")
    code = "LIMIT=$(test -e started && echo 1000 || echo 1e-6); touch started; "
    (tmp_path / "Snakefile").write_text(limited.replace('shell: "', f'shell: "{code}'))
    done = programs.run([SNAKEMAKE, "--cores", "4"], cwd=tmp_path)
    assert "exit status 75" in done.stdout + done.stderr
    assert "resuming at step" in done.stdout + done.stderr
    assert json.loads((tmp_path / "runs/digits/summary.json").read_text())["epochs"] == 2


NOTEBOOK = textwrap.dedent(
    re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/from-torchft.md").read_text(), re.MULTILINE | re.DOTALL
    )[0]
)
STEPS = {1: 16, 4: 4}
"""The steps that the script makes, by the number of ranks."""


@pytest.mark.long
def test_a_notebook_becomes_a_job(tmp_path: Path) -> None:
    formats: Any = pytest.importorskip("nbformat")
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    cells = [formats.v4.new_code_cell(text) for text in NOTEBOOK.split("\n", 7)]
    notebook = tmp_path / "notebook.ipynb"
    formats.write(formats.v4.new_notebook(cells=cells), notebook)
    convert = [sys.executable, "-m", "nbconvert", "--to"]
    programs.run([*convert, "notebook", "--execute", "--inplace", notebook.name], cwd=tmp_path)
    printed = notebook.read_text()
    assert f"{STEPS[1]} steps" in printed
    assert "one rank, one group" in printed
    programs.run([*convert, "python", notebook.name], cwd=tmp_path)
    done = programs.run([programs.mpiexec(), "-n", str(RANKS), sys.executable, "notebook.py"], cwd=tmp_path)
    assert done.stdout == f"{STEPS[RANKS]} steps\n"
