"""Tests that `hpcsgd launch` with a test device on every rank trains the same bits as the host."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import far
import programs
from hpcsgd.report.run_folder import replica_group_folder
from train.launches import HPCSGD, ended, make_store, start

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("far_device")]

SITE = f"""
import os
if "HPCSGD_REPLICA_GROUP" in os.environ:
    import sys
    sys.path.insert(0, {str(Path(far.__file__).parents[1])!r})
    import far
    far.prepare()
    on = far.switched_on()
    on.__enter__()
"""
"""Code that every Python runs first; Pythons of ranks get the device."""
JOB = """
data = { path = "small.h5", group_batch_size = 8 }
model = { name = "mlp", arguments = { inputs = 36, hidden = [8] } }
optimizer = { lr = 0.1, arguments = { momentum = 0.9 } }
method = { name = "ensemble_sync", sync_every = 3 }
training = { epochs = 2, log_every = 1 }
"""


def test_groups_that_may_die(tmp_path: Path) -> None:
    programs.mpiexec()
    make_store(tmp_path / "small.h5", 96, 20)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    models = []
    for on in ("cpu", "auto"):
        shape = ["--groups", "2", "--group-size", "2"]
        words = ["launch", "job.toml", *shape, "--run.output_dir", on, "--training.device", on]
        path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
        run = ended(start(tmp_path, [*HPCSGD, *words], PYTHONPATH=path))
        assert run.code == 0, run
        assert (", on far:0, far:1" in run.out) == (on == "auto"), run
        (told,) = json.loads((replica_group_folder(tmp_path / on, 1) / "versions.json").read_text())
        assert told["devices"] == ({"far:0": 1, "far:1": 1} if on == "auto" else {"cpu": 2})
        models.append(torch.load(tmp_path / on / "model.pt"))
    for name, value in models[0].items():
        assert torch.equal(models[1][name], value), name
