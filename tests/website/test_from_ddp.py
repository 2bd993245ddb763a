"""The page for users of DDP shows how its two scripts differ, and both train."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hpcsgd
import programs
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import form
from launchers import Launcher, by_each_launcher, by_torchrun
from references import model as make_model
from references import one_step, vector
from train.launches import unlaunched

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/from_ddp"
SHOWN = re.compile(r"^```diff\n(.*?)\n^```", re.MULTILINE | re.DOTALL)
ACCURACY = re.compile(r"^epoch (\d): accuracy (0\.\d+)$", re.MULTILINE)
LEAST = 0.75
"""The least accuracy after four epochs; that of an untrained model is 0.1."""


def test_the_page_shows_the_difference() -> None:
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("before.py", "after.py"))
    lines = difflib.unified_diff(before, after, "before.py", "after.py", n=1, lineterm="")
    whole, _ = SHOWN.findall((ROOT / "docs/from-ddp.md").read_text())
    assert whole == "\n".join(lines)


METHODS: dict[str, Callable[[], hpcsgd.Method]] = {
    "hierarchical": lambda: hpcsgd.hierarchical(sync_every=2),
    "diloco": lambda: hpcsgd.diloco(sync_every=2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.ranks(4)
def test_the_lines_for_checkpoints_of_torch(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The old lines raise. The new ones restore all groups to the bit, between two synchronizations."""
    _, shown = SHOWN.findall((ROOT / "docs/from-ddp.md").read_text())
    old, new = ([line[1:] for line in shown.splitlines() if line[:1] == sign] for sign in "-+")
    imported, save, load = new
    monkeypatch.chdir(tmp_path)

    def trained(names: dict[str, Any], topology: hpcsgd.Topology, steps: range) -> Tensor:
        for t in steps:
            one_step(names["model"], names["optimizer"], topology, t)
        return vector(names["model"])

    def body(world: Communicator) -> None:
        topology = form(world, 2)

        def made() -> dict[str, Any]:
            net = make_model()
            inner = torch.optim.AdamW(net.parameters(), lr=0.1)
            optimizer = hpcsgd.DistributedOptimizer(inner, net, topology, METHODS[method]())
            names = {"model": net, "optimizer": optimizer}
            exec(imported, names)
            return names

        names = made()
        trained(names, topology, range(3))
        with pytest.raises(hpcsgd.UserError, match=r"call hpcsgd.save\(folder, optimizer\) in place of"):
            exec("\n".join(old), dict(names))
        exec(save, names)
        expected = trained(names, topology, range(3, 6))
        again = made()
        exec(load, again)
        assert torch.equal(trained(again, topology, range(3, 6)), expected)

    run(4, body)


def test_the_page_says_which_name_the_error_about_join_has() -> None:
    page = (ROOT / "docs/from-ddp.md").read_text()
    (name,) = re.findall(
        r"^\| `model\.join\(\)`.*no `hpcsgd\.join`: its error names `(\w+)`", page, re.MULTILINE
    )
    with pytest.raises(AttributeError, match=f"'join'; use '{name}' instead"):
        getattr(hpcsgd, "join")  # noqa: B009 - type checkers know that it is not there


def trained(command: list[str], folder: Path) -> list[tuple[str, str]]:
    return ACCURACY.findall(programs.run(command, cwd=folder, env=unlaunched()).stdout)


@pytest.mark.slow
@by_each_launcher
def test_the_script_trains_and_resumes(by: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "after.py"
    shutil.copy(EXAMPLES / "after.py", script)
    found = trained(by(script), tmp_path)
    assert [epoch for epoch, _ in found] == ["1", "2", "3", "4"]
    assert float(found[-1][1]) > LEAST
    script.write_text(script.read_text().replace("EPOCHS = 4", "EPOCHS = 6"))
    assert [epoch for epoch, _ in trained(by(script), tmp_path)] == ["5", "6"]


ENDED_BY_GLOO = "terminate called without an active exception"
"""What torch prints if a thread of gloo drops its last tensor while Python ends: pytorch issue 190489."""


@pytest.mark.long
def test_the_script_for_ddp_trains(tmp_path: Path) -> None:
    """It trains and saves. It is a script of torch alone, and torch may abort it when all of this is done."""
    command = by_torchrun(EXAMPLES / "before.py", n=2)
    done = programs.run(command, cwd=tmp_path, env=unlaunched(), check=False)
    assert done.returncode == 0 or ENDED_BY_GLOO in done.stderr, done.stderr
    found = ACCURACY.findall(done.stdout)
    assert [epoch for epoch, _ in found] == ["1", "2", "3", "4"]
    assert float(found[-1][1]) > LEAST
    assert torch.load(tmp_path / "checkpoint.pt")["epoch"] == 4
