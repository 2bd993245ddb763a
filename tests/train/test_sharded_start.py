"""Tests that trainings with `[parallel] fsdp` begin with the same values, whatever builds the model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcsgd.comm import Communicator
from hpcsgd.config.schema import Config, load
from hpcsgd.core.fsdp import all_gathered
from hpcsgd.core.topology import form
from hpcsgd.performance.probing.virtual import virtual_groups
from hpcsgd.train.by_torch import bytes_by_torch
from hpcsgd.train.training_setup import assemble, make_model
from train.export.test_export import write_text

pytestmark = [pytest.mark.processes, pytest.mark.ranks(4)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    return load(write_text(folder, "bytes"), ["--parallel.fsdp", "true", "--method.name", "hierarchical"])


@pytest.mark.parametrize("P", [1, 2])
def test_a_probe_starts_from_the_same_bits(run, config: Config, P: int) -> None:
    """The probe makes its own models, which are not sharded."""

    def values(world: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        sharded = assemble(config, form(world, P), "job.toml").model
        alone = world.split(world.rank, 0)
        probed = virtual_groups(config, 2, 1, alone).trainees[0].model
        return {n: all_gathered(p).detach() for n, p in sharded.named_parameters()}, dict(
            probed.named_parameters()
        )

    for sharded, probed in run(4, values):
        assert sharded.keys() == probed.keys()
        assert all(torch.equal(x, probed[name]) for name, x in sharded.items())
        assert any(x.ne(0).any() for x in sharded.values())


def test_what_torch_sends_is_reported_of_the_sharded_model_as_of_the_plain_one(run, config: Config) -> None:
    """Weights are gathered twice and gradients reduced once. Weights outside of blocks are gathered once."""

    def told(world: Communicator) -> float:
        return bytes_by_torch(assemble(config, form(world, 2), "job.toml").model, config.model.fsdp_units, 2)

    plain = make_model(config)
    (block,) = plain.get_submodule("blocks").children()
    outside = 4 * (sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in block.parameters()))
    inside = 4 * sum(p.numel() for p in block.parameters())
    assert run(4, told) == [bytes_by_torch(plain, None, 2)] * 4 == [(3 * inside + 2 * outside) / 2] * 4
