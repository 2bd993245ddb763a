"""Virtual ranks that read a text, whose epochs end with the last whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.data import Windows, convert_text
from hpcsgd.errors import UserError
from hpcsgd.performance.probing.virtual import virtual_groups
from hpcsgd.performance.probing.virtual_ranks import virtual_rank
from hpcsgd.train.training_setup import assemble

JOB = """
data = { path = "text.h5", group_batch_size = 8, arguments = { bptt = 3 } }
model = { name = "gpt", arguments = { types = 256, width = 4, layers = 1, heads = 1 } }
optimizer = { lr = 1.0 }
lr_schedule = { scaling = "none", name = "StepLR", arguments = { step_size = 1, gamma = 0.5 } }
method = { name = "hierarchical", sync_every = 2 }
training = { epochs = 1 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("twenty windows of three tokens, and so two steps and a half.")
    convert_text([tmp_path / "a.txt"], tmp_path / "text.h5", "bytes", test=[tmp_path / "a.txt"])
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def test_epochs_are_as_long_as_in_the_real_job(folder: Path) -> None:
    config = load(folder / "job.toml")

    def rates(world: Communicator) -> list[float]:
        assert assemble(config, form(world), "job.toml").steps_per_epoch == 2
        groups, found = virtual_groups(config, 1, 1, world), list[float]()
        for _ in range(5):
            groups.train(1)
            found += [group["lr"] for group in groups.trainees[0].optimizer.param_groups]
        return found

    assert threads.run(1, rates) == [[1.0, 0.5, 0.5, 0.25, 0.25]]


def test_too_few_for_a_batch_are_refused(folder: Path) -> None:
    """The call raises an error instead of searching for ever."""
    data = Windows(folder / "text.h5", "train", bptt=3)
    with pytest.raises(
        UserError, match=r"an epoch has 10 samples per rank or group, of which a step takes 11"
    ):
        virtual_rank(data, lambda _: (torch.empty(0), torch.empty(0)), batch=11, rank=0, size=2, seed=0)
